"""Tests of the benches' candidates: messages do what the collectives do, and all train alike."""

import pytest
import torch
import torch.distributed as dist

from sidestream.bench.models import DecoderConfig, build_batch
from sidestream.bench.rivals import (
    TRAINER_NAMES,
    MessageAllGather,
    MessageReduceScatter,
    build_trainer,
)
from sidestream.tests.ranks import run_on_ranks

CONFIG = DecoderConfig(layers=2, width=16, heads=2, hidden=32, vocabulary=32, sequence=8, batch=2)
STEPS = 3
# Two ranks add in either order to the same bits; three round differently in another order, by an
# error that Adam may turn into a good part of a step (3e-4) where a gradient is next to zero.
TOLERANCE = {2: 0.0, 3: 3e-4}


def _gathered(rank: int, world_size: int, in_place: bool) -> list[torch.Tensor]:
    part = torch.randn(37, generator=torch.Generator().manual_seed(rank))
    expected = torch.empty(world_size * 37)
    dist.all_gather(list(expected.chunk(world_size)), part)
    output = torch.full((world_size * 37,), float("nan"))
    if in_place:
        own = output[rank * 37 : (rank + 1) * 37]
        part = own.copy_(part)
    comm = MessageAllGather()
    assert comm(output, part, dist.group.WORLD) is None
    return [output, expected]


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "apart"])
@pytest.mark.parametrize("world", [1, 2, 3], ids=lambda world: f"world{world}")
def test_message_all_gather_gathers(world, in_place):
    for output, expected in run_on_ranks(_gathered, world, in_place):
        assert torch.equal(output, expected)


def _scattered(rank: int, world_size: int, mean: bool) -> list[torch.Tensor]:
    inputs = [
        torch.randn(world_size * 37, generator=torch.Generator().manual_seed(peer))
        for peer in range(world_size)
    ]
    mine = inputs[rank].clone()
    output = torch.full((37,), float("nan"))
    comm = MessageReduceScatter()
    operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    assert comm(output, mine, dist.group.WORLD, operation) is None
    assert torch.equal(mine, inputs[rank])
    expected = inputs[0][rank * 37 : (rank + 1) * 37].clone()
    for peer in range(1, world_size):
        expected += inputs[peer][rank * 37 : (rank + 1) * 37]
    builtin = torch.empty(37)
    dist.reduce_scatter_single(builtin, mine, op=operation)
    return [output, expected / world_size if mean else expected, builtin]


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("world", [1, 2, 3], ids=lambda world: f"world{world}")
def test_message_reduce_scatter_adds_in_rank_order(world, mean):
    for output, expected, builtin in run_on_ranks(_scattered, world, mean):
        assert torch.equal(output, expected)
        torch.testing.assert_close(output, builtin, rtol=0.0, atol=world * 6 * 2**-23)


def _refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        MessageReduceScatter()(torch.empty(1), torch.empty(1), dist.group.WORLD, dist.ReduceOp.MAX)
    return str(caught.value)


def test_message_reduce_scatter_refuses_other_operations():
    assert "must be SUM or AVG" in run_on_ranks(_refused, 1)[0]


def _trained(rank: int, world_size: int, name: str) -> dict:
    trainer = build_trainer(name, CONFIG)
    losses = [
        float(trainer.step(*build_batch(CONFIG, seed=world_size * step + rank)))
        for step in range(STEPS)
    ]
    return {"losses": losses, "parameters": trainer.full_parameters()}


@pytest.mark.parametrize("world", [2, 3], ids=lambda world: f"world{world}")
@pytest.mark.parametrize("name", [name for name in TRAINER_NAMES if name not in ("plain", "ddp")])
def test_every_candidate_trains_as_ddp_does(name, world):
    reference = run_on_ranks(_trained, world, "ddp")
    ranks = run_on_ranks(_trained, world, name)
    tolerance = TOLERANCE[world]
    for rank, (ours, theirs) in enumerate(zip(ranks, reference, strict=True)):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=tolerance), rank
        assert ours["parameters"].keys() == theirs["parameters"].keys()
        for parameter, value in theirs["parameters"].items():
            torch.testing.assert_close(
                ours["parameters"][parameter], value, rtol=0.0, atol=tolerance
            )


def test_plain_ranks_drift_apart():
    """What the comparison above would catch: without communication ranks hold other weights."""
    first, second = (each["parameters"] for each in run_on_ranks(_trained, 2, "plain"))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_unknown_candidate_is_refused():
    with pytest.raises(ValueError, match="got 'zero4'"):
        build_trainer("zero4", CONFIG)
