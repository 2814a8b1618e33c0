"""Reduce-scatter with a sum in FP32: each bit against sums in plain PyTorch, on 1 to 4 ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sidestream.bench.virtual_streams import LoopbackGroup, Machine
from sidestream.sharding.lanes import DeferredLane, StreamLane
from sidestream.sharding.reduce_scatter import reduce_scatter_with_fp32_accumulation
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.race_detector import Racing

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
BF16, FP32 = torch.bfloat16, torch.float32
NUMEL = 1000


def _inputs(world_size, dtype=BF16, numel=NUMEL, seed=0):
    """Those of all ranks, of magnitudes that lose bits when they meet."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(world_size, world_size * numel, generator=generator)
    return (values * 10 ** torch.randint(-2, 3, values.shape, generator=generator)).to(dtype)


def _expected(inputs, rank, op, dtype):
    """The definition: each partial sum rounded to FP32, in the order of ranks, then one cast."""
    parts = inputs.chunk(len(inputs), dim=1)[rank].float()
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    if op == AVG:
        total = total * torch.tensor(1 / len(inputs), dtype=FP32)
    return total.to(dtype)


def _ring(inputs, rank):
    """A sum that rounds to the wire's dtype at every rank, as rings and trees do."""
    parts = inputs.chunk(len(inputs), dim=1)[rank]
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return (
        one.dtype == other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    )


def _every_sum(rank, world_size):
    """By name, whether what came is what is defined."""
    found = {}
    for op in (SUM, AVG):
        for sent, kept in ((BF16, BF16), (BF16, FP32), (torch.float16, FP32), (FP32, FP32)):
            inputs = _inputs(world_size, sent)
            output = torch.full((NUMEL,), float("nan"), dtype=kept)
            assert reduce_scatter_with_fp32_accumulation(output, inputs[rank], op) is None
            name = f"{op} of {sent} to {kept}"
            found[name] = _same(output, _expected(inputs, rank, op, kept))
            # Scaling by a power of two before the wire is exact: the same as scaling the sum.
            output = torch.empty(NUMEL, dtype=kept)
            reduce_scatter_with_fp32_accumulation(output, inputs[rank] * 0.25, op)
            scaled = (_expected(inputs, rank, op, FP32) * 0.25).to(kept)
            if sent != torch.float16:  # has no bits left below its least normal number
                found[f"{name}, scaled before"] = _same(output, scaled)
    inputs = _inputs(world_size)
    if world_size > 2:
        different = _expected(inputs, rank, SUM, BF16) != _ring(inputs, rank)
        found["not what rounding at every rank gives"] = bool(different.any())
    # In place, with memory of the caller's, of other shapes: a bucket and its own slice.
    for dtype in (BF16, FP32):
        inputs = _inputs(world_size, dtype)
        bucket, scratch = inputs[rank].clone(), torch.full_like(inputs[rank], float("nan"))
        shard = bucket.chunk(world_size)[rank]
        reduce_scatter_with_fp32_accumulation(
            shard, bucket.view(world_size, -1), scratch=scratch.view(2, -1)
        )
        found[f"in place, {dtype}"] = _same(shard, _expected(inputs, rank, SUM, dtype))
    # What is not finite stays so, in its own elements alone.
    inputs = _inputs(world_size)
    inputs[0, 3::NUMEL], inputs[-1, 5::NUMEL] = float("nan"), float("inf")
    inputs[0, 7::NUMEL], inputs[-1, 7::NUMEL] = float("inf"), float("-inf")
    output = torch.empty(NUMEL, dtype=BF16)
    reduce_scatter_with_fp32_accumulation(output, inputs[rank])
    found["not finite"] = _same(output, _expected(inputs, rank, SUM, BF16))
    empty = torch.empty(0)
    reduce_scatter_with_fp32_accumulation(empty, torch.empty(0), async_op=True).wait()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_sum_is_made_in_fp32_in_rank_order_and_rounded_once(world_size):
    for found in run_on_ranks(_every_sum, world_size):
        assert found and all(found.values()), [name for name, same in found.items() if not same]


def _several_at_once(rank, world_size):
    """Of different lengths, in two groups, on one lane and on their own; waited for backwards."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cases = []
    lane = DeferredLane()
    for number in range(6):
        members = range(world_size) if number % 2 else range(rank // 2 * 2, rank // 2 * 2 + 2)
        group = None if number % 2 else pairs[rank // 2]
        inputs = _inputs(world_size, numel=300 + number, seed=number)[:, : -number or None]
        inputs = inputs[members, : len(members) * (200 + number)].contiguous()
        place = members.index(rank)
        output = torch.full((200 + number,), float("nan"), dtype=BF16)
        before = dist.reduce_scatter_tensor
        work = reduce_scatter_with_fp32_accumulation(
            output, inputs[place], SUM, group, True, lane=lane if number in (1, 2, 4) else None
        )
        assert dist.reduce_scatter_tensor is before
        assert work is not None and output.isnan().all()  # the sum waits for whoever needs it
        cases.append((work, output, _expected(inputs, place, SUM, BF16)))
    for work, _, _ in reversed(cases):
        work.wait()
        work.wait()
    outputs = [output.clone() for _, output, _ in cases]
    for work, output, _ in cases:
        output.zero_()
        work.wait()  # does not sum again
        assert not output.any()
    # Torch's own is what it was: nothing of ours is bound to the process.
    plain = torch.empty(8)
    dist.reduce_scatter_tensor(plain, torch.ones(8 * world_size))
    assert plain.tolist() == [world_size] * 8
    return [_same(output, case[2]) for output, case in zip(outputs, cases, strict=True)]


def test_any_number_may_be_under_way_in_several_groups():
    assert run_on_ranks(_several_at_once, 4) == [[True] * 6] * 4


class _Part(torch.Tensor):
    pass


def _misuse(rank, world_size):
    def refusal(*args, **kwargs):
        with pytest.raises((ValueError, TypeError)) as caught:
            reduce_scatter_with_fp32_accumulation(*args, **kwargs)
        return str(caught.value)

    lone = [dist.new_group([place]) for place in range(world_size)]
    a, b = torch.zeros(4, dtype=BF16), torch.zeros(8, dtype=BF16)
    texts = {
        "uneven": refusal(a, torch.zeros(9, dtype=BF16)),
        "short": refusal(torch.zeros(3, dtype=BF16), b),
        "scratch": refusal(a, b, scratch=torch.zeros(6, dtype=BF16)),
        "scratch dtype": refusal(a, b, scratch=torch.zeros(8)),
        "scratch shared": refusal(a, b, scratch=b),
        "strides": refusal(a, torch.zeros(16, dtype=BF16)[::2]),
        "strides of output": refusal(torch.zeros(8, dtype=BF16)[::2], b),
        "dtype": refusal(a.half(), b),
        "integers": refusal(a.int(), b.int()),
        "op": refusal(a, b, dist.ReduceOp.MAX),
        "group": refusal(a, b, SUM, lone[1 - rank]),
        "async_op": refusal(a, b, SUM, None, "yes"),
        "subclass": refusal(a, b.as_subclass(_Part)),
        "no tensor": refusal(a, [b]),
    }
    assert not a.any()
    reduce_scatter_with_fp32_accumulation(a, b + 1)  # and nothing was sent before
    assert a.tolist() == [2.0] * 4
    weight = nn.Parameter(torch.zeros(4))
    reduce_scatter_with_fp32_accumulation(weight, torch.ones(8))
    assert weight.tolist() == [2.0] * 4
    return texts


def test_what_does_not_fit_is_refused_with_its_numbers():
    for texts in run_on_ranks(_misuse, 2):
        for name, words in {
            "uneven": ("2 parts", "4 elements", "got 9"),
            "short": ("3 elements", "got 8"),
            "scratch": ("scratch", "(8,)", "(6,)"),
            "scratch dtype": ("scratch", "torch.bfloat16", "got torch.float32"),
            "scratch shared": ("scratch", "input"),
            "strides": ("input", "contiguous"),
            "strides of output": ("output", "contiguous"),
            "dtype": ("output", "torch.bfloat16", "got torch.float16"),
            "integers": ("got torch.int32",),
            "op": ("SUM or ReduceOp.AVG",),
            "group": ("this rank is in",),
            "async_op": ("async_op", "'yes'"),
            "subclass": ("plain tensor", "_Part"),
            "no tensor": ("torch.Tensor", "list"),
        }.items():
            assert all(word in texts[name] for word in words), texts[name]


# ---- on CUDA's streams, which are fake ones here


def _on_streams(machine: Machine, monkeypatch: pytest.MonkeyPatch, drop: str = "") -> list[Tensor]:
    """What two under way at once give, where all ranks hold alike; without the wait `drop`."""
    group = LoopbackGroup(machine, 2)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    with machine.installed(), machine:
        lane = StreamLane(torch.device("cpu"))
        works, outputs = [], []
        for number in range(2):
            inputs = torch.full((8,), 1.5, dtype=BF16) * (number + 1)
            outputs.append(torch.empty(4, dtype=BF16))
            if drop == "wait_stream":
                machine.streams[1].wait_stream = lambda _: None  # type: ignore[method-assign]
            works.append(
                reduce_scatter_with_fp32_accumulation(
                    outputs[-1],
                    inputs,
                    SUM,
                    group,
                    True,
                    lane=lane,  # type: ignore[arg-type]
                )
            )
            del inputs
        for work in works:
            if drop != "wait":
                work.wait()
        results = [output + 0 for output in outputs]
    return results


def test_on_cuda_the_sum_runs_on_a_side_stream_and_wait_orders_the_current_one(monkeypatch):
    machine = Racing()
    results = _on_streams(machine, monkeypatch)
    assert [result.tolist() for result in results] == [[3.0] * 4, [6.0] * 4]
    assert len(machine.streams) == 2 and not machine.hazards and not machine.early_frees
    side = machine.streams[1]
    assert side.clock[side] > 2  # more than the two exchanges: the sums too


@pytest.mark.parametrize("drop", ["wait", "wait_stream"])
def test_without_a_wait_there_is_a_hazard(monkeypatch, drop):
    machine = Racing()
    _on_streams(machine, monkeypatch, drop)
    assert machine.hazards
