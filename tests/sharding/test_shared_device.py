"""Ranks that share one device, over gloo: they train like plain PyTorch and hold the same bits.

NCCL refuses two ranks on a GPU; gloo takes a GPU's tensors by way of the host. Slow, but on a
machine with one GPU it is how the streams of several ranks, their exchange and their gathers run.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sidestream.bench.models import DecoderConfig, build_batch
from sidestream.bench.rivals import Setup, build_trainer
from sidestream.bench.step_worker import check_agreement, compare_parameters
from sidestream.sharding.collectives import Channel
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.training.result import sha256_of

LEVELS = ("zero0", "zero3")
STEPS = 4
CONFIG = DecoderConfig(
    layers=2, width=64, heads=4, hidden=176, vocabulary=256, sequence=32, batch=2
)
# What torch.empty hands out is filled on the current stream, which need not be its owner's.
UNPOISONED = {"SIDESTREAM_TEST_POISON": "0"}


def _device(device_type):
    if device_type == "cuda":
        torch.cuda.set_device(0)
    return torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)


def _try_collectives(rank, world_size, device_type):
    """What training calls of gloo: nothing of ours."""
    ranks = torch.arange(world_size, dtype=torch.float32, device=_device(device_type))
    for call in (
        lambda out: dist.all_gather_into_tensor(out, ranks[rank : rank + 1].clone()),
        lambda out: dist.all_to_all_single(out, ranks[rank].repeat(world_size)),
        lambda out: dist.all_reduce(out.copy_(ranks), op=dist.ReduceOp.MAX),
        lambda out: dist.broadcast(out if rank else out.copy_(ranks), src=0),
    ):
        out = torch.full_like(ranks, -1.0)
        call(out)
        assert torch.equal(out, ranks)


def _batch(step, rank, device):
    seed = step * dist.get_world_size() + rank
    return [each.to(device) for each in build_batch(CONFIG, seed=seed)]


def _plain(rank, world_size, setup):
    """This rank's losses and the weights, of plain PyTorch on the mean of all ranks' gradients."""
    trainer = build_trainer("plain", CONFIG, setup)
    losses = []
    for step in range(STEPS):
        for other in range(world_size):
            loss = trainer.module(*_batch(step, other, setup.device))
            (loss / world_size).backward()
            if other == rank:
                losses.append(loss.item())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return losses, _on_cpu(trainer.full_parameters())


def _on_cpu(weights):
    return {name: weight.detach().cpu() for name, weight in weights.items()}


def _train(rank, world_size, device_type):
    """By level: the weights' distance from plain PyTorch's, and their hash."""
    device = _device(device_type)
    # Of the group there is: for a GPU, init_device_mesh makes one with NCCL in some versions.
    mesh = DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=("dp",))
    setup = Setup(mesh=mesh, device=device)
    expected_losses, expected = _plain(rank, world_size, setup)
    found = {}
    for level in LEVELS:
        trainer = build_trainer(level, CONFIG, setup)
        losses = [trainer.step(*_batch(step, rank, device)).item() for step in range(STEPS)]
        weights = _on_cpu(trainer.full_parameters())
        distance, _ = compare_parameters(expected, weights)
        check_agreement({"plain": expected_losses, level: losses}, distance)
        found[level] = distance, sha256_of(weights)
    return found


def _train_wrongly(rank, world_size, device_type):
    """As if the exchange mixed ranks up."""
    exchange = Channel.exchange

    def mixed(collectives, received, sent, what):
        return exchange(collectives, received, sent.mul_(1.0 + rank), what)

    Channel.exchange = mixed
    return _train(rank, world_size, device_type)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("device", "world"),
    [
        ("cpu", 2),
        pytest.param("cuda", 2, marks=pytest.mark.gpu),
        pytest.param("cuda", 4, marks=pytest.mark.gpu),
    ],
)
def test_ranks_train_like_plain_pytorch(device, world, record_property):
    if device == "cuda":
        try:
            run_on_ranks(_try_collectives, world, device)
        except RanksFailed as failed:
            pytest.skip(f"gloo does not take tensors of this GPU: {failed}")
    found = run_on_ranks(_train, world, device, env=UNPOISONED)
    for level in LEVELS:
        assert len({outcome[level][1] for outcome in found}) == 1, "ranks hold other weights"
    distances = ", ".join(f"{level} {found[0][level][0]:.1e}" for level in LEVELS)
    same = len({sha256 for _, sha256 in found[0].values()}) == 1
    bits = "yes" if same else "no"
    record_property(
        "detail",
        f"{world} ranks: weights off plain PyTorch's by {distances}; same bits at both: {bits}",
    )


def test_what_training_calls_of_gloo_works_on_a_cpu():
    run_on_ranks(_try_collectives, 2, "cpu")


def test_a_wrong_exchange_is_found():
    with pytest.raises(RanksFailed, match="did not train alike"):
        run_on_ranks(_train_wrongly, 2, "cpu")
