"""Tests of the benches' candidates: messages do what the collectives do, and all train alike."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist

from sidestream.bench import rivals
from sidestream.bench.fsdp2_messages import MessageAllGather, MessageReduceScatter
from sidestream.bench.models import Block, DecoderConfig, build_batch
from sidestream.bench.rivals import (
    LEARNING_RATE,
    MEGATRON_FSDP,
    TRAINER_NAMES,
    Setup,
    build_trainer,
    require_trainer,
)
from sidestream.tests.ranks import run_on_ranks
from sidestream.training.errors import UsageError

CONFIG = DecoderConfig(layers=2, width=16, heads=2, hidden=32, vocabulary=32, sequence=8, batch=2)
STEPS = 3
# Two ranks add in either order to the same bits; three round differently in another order, by an
# error that Adam may turn into a good part of a step (3e-4) where a gradient is next to zero.
TOLERANCE = {2: 0.0, 3: 3e-4}
ON_CPU = tuple(name for name in TRAINER_NAMES if name != MEGATRON_FSDP)


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


@pytest.mark.parametrize(
    ("world", "in_place"),
    [(1, False), (2, True), (3, True), (3, False)],
    ids=["one-rank", "two-in-place", "three-in-place", "three-apart"],
)
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
    dist.reduce_scatter(builtin, list(mine.chunk(world_size)), op=operation)
    return [output, expected / world_size if mean else expected, builtin]


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("world", [1, 3], ids=lambda world: f"world{world}")
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


@functools.cache
def _trained_by_ddp(world: int) -> list[dict]:
    return run_on_ranks(_trained, world, "ddp")


@pytest.mark.parametrize("world", [2, 3], ids=lambda world: f"world{world}")
@pytest.mark.parametrize("name", [name for name in ON_CPU if name not in ("plain", "ddp")])
def test_every_candidate_trains_as_ddp_does(name, world):
    reference = _trained_by_ddp(world)
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


def _trained_in_bf16(rank: int, world_size: int, name: str) -> dict:
    trainer = build_trainer(name, CONFIG, Setup(dtype=torch.bfloat16))
    computed = set()
    for module in trainer.module.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda *call: computed.add(call[-1].dtype))
    losses = [
        trainer.step(*build_batch(CONFIG, seed=world_size * step + rank)) for step in range(STEPS)
    ]
    parameters = trainer.full_parameters()
    return {"losses": torch.stack(losses), "parameters": parameters, "computed": computed}


def test_bf16_is_computed_in_and_main_parameters_are_not():
    ours, theirs = (run_on_ranks(_trained_in_bf16, 2, name) for name in ("zero3", "fsdp2"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["computed"] == other["computed"] == {torch.bfloat16}
        torch.testing.assert_close(one["losses"], other["losses"], rtol=0.01, atol=0.0)
        for name, value in one["parameters"].items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(other["parameters"][name], value, rtol=0.0, atol=1e-4)


class _Package:
    """Does what Megatron-FSDP's `fully_shard` does to an optimizer, and nothing to the model."""

    @staticmethod
    def fully_shard(module, optimizer, **options):
        assert options["zero_dp_strategy"] == 3
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": module.parameters()})
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return module, optimizer


def test_megatron_fsdp_starts_where_the_others_do(monkeypatch):
    """Its wrapping takes a step with zero gradients, which decays weights and counts."""
    monkeypatch.setattr(rivals, "require_trainer", lambda *_: None)
    monkeypatch.setitem(sys.modules, MEGATRON_FSDP, _Package)
    theirs, plain = build_trainer(MEGATRON_FSDP, CONFIG), build_trainer("plain", CONFIG)
    assert theirs.optimizer.param_groups[0]["lr"] == LEARNING_RATE
    for step in range(STEPS):
        batch = build_batch(CONFIG, seed=step)
        assert torch.equal(theirs.step(*batch), plain.step(*batch))
    for one, other in zip(theirs.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_megatron_fsdp_needs_its_package_and_a_gpu(monkeypatch):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="expected the package megatron-fsdp"):
        require_trainer(MEGATRON_FSDP, "cuda")
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UsageError, match="expected a GPU"):
        require_trainer(MEGATRON_FSDP, "cpu")
    require_trainer(MEGATRON_FSDP, "cuda")


def test_unknown_candidate_is_refused():
    with pytest.raises(ValueError, match="got 'zero4'"):
        build_trainer("zero4", CONFIG)
