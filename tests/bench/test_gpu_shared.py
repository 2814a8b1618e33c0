"""Ranks that share a device, on a CPU: they train like plain PyTorch and hold the same bits."""

import pytest
import torch
import torch.distributed as dist

from sidestream.bench import gpu_shared
from sidestream.sharding.collectives import Collectives
from sidestream.tests.ranks import RanksFailed, run_on_ranks

CPU = torch.device("cpu")


def _share(rank, world_size):
    return gpu_shared.work(rank, "cpu")


def _share_wrongly(rank, world_size):
    """As if the exchange mixed ranks up."""
    exchange = Collectives.exchange

    def mixed(collectives, received, sent, what):
        return exchange(collectives, received, sent.mul_(1.0 + rank), what)

    Collectives.exchange = mixed
    return gpu_shared.work(rank, "cpu")


def _try(rank, world_size):
    dist.broadcast = lambda tensor, src: None
    gpu_shared.require_collectives(CPU)


def _send_wrongly(rank, world_size):
    send = dist.isend
    dist.isend = lambda tensor, dst: send(tensor + 1.0, dst)
    gpu_shared.require_collectives(CPU)


def test_levels_train_like_plain_pytorch():
    found = gpu_shared.summarise(run_on_ranks(_share, 2))
    assert found["same_bits"] and found["world"] == 2
    assert set(found["levels"]) == {"zero0", "zero3"}
    for level in found["levels"].values():
        assert len(level["losses"]) == gpu_shared.STEPS
        assert level["losses"][-1] < level["losses"][0]
        assert 0.0 <= level["relative_difference"] < 1e-5


def test_a_wrong_exchange_is_found():
    with pytest.raises(RanksFailed, match="did not train alike"):
        run_on_ranks(_share_wrongly, 2)


def test_a_collective_that_does_nothing_is_named():
    expected = r"broadcast on cpu: expected \[0.0, 1.0\], got"
    with pytest.raises(RanksFailed, match=rf"{expected}.*; .*or another --device"):
        run_on_ranks(_try, 2)


def test_a_wrong_send_is_named():
    with pytest.raises(RanksFailed, match="send_and_receive on cpu: expected"):
        run_on_ranks(_send_wrongly, 2)


def test_ranks_with_other_weights_are_found():
    same, other = (
        {"zero0": gpu_shared.Level(losses=[1.0], relative_difference=0.0, sha256=text)}
        for text in "ab"
    )
    assert gpu_shared.summarise([same, same])["levels"]["zero0"]["sha256"] == "a"
    expected = "zero0: expected the same weights on 3 ranks, got 2"
    with pytest.raises(RuntimeError, match=f"{expected}.*; .* pytest tests/sharding"):
        gpu_shared.summarise([same, same, other])
