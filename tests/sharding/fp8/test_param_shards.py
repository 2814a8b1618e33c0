"""`quantize_param_shard`: ranks together make the bits of the whole tensors on one rank."""

import math
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sidestream.buffers import flat_layout
from sidestream.sharding.fp8 import (
    DelayedScaling,
    History,
    QuantizedTensor,
    quantize,
    quantize_param_shard,
    recipe_for,
    update_scales,
)
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.fp8.kinds import BLOCKS, same, wild

ODD = [(130, 96), (7,), (3, 5, 64), (), (20, 260), (0, 4), (33, 66)]
BLOCKED = [(48, 256), (1000,), (3, 5, 128)]
VALUES = ((torch.float32, None), (torch.bfloat16, math.nan), (torch.float32, -math.inf))
# Blocks that our layout does not cut are nobody else's matter.
UNCUT = {("1x128", "blocked"), ("mxfp8", "blocked")}


def wholes(shapes, dtype, bad):
    torch.manual_seed(5)
    found = [(wild(*shape) if shape else torch.randn(())).to(dtype) for shape in shapes]
    if bad is not None:
        found[0].view(-1)[found[0].numel() // 2] = bad
    return found


def cleared(x, blocks):
    """Memory in which what nobody writes is zero."""
    made = QuantizedTensor.empty(tuple(x.shape), blocks)
    for tensor in (made.codes, made.scales):
        tensor.view(torch.uint8).zero_() if tensor.dim() else tensor.zero_()
    return made


def merged(made):
    """What all ranks have written: bytes of zero where one has not."""
    flat = [tensor.view(-1).view(torch.uint8) for one in made for tensor in (one.codes, one.scales)]
    every = torch.cat(flat)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    for part, found in zip(flat, every.split([len(part) for part in flat]), strict=True):
        part.copy_(found)


def spans_of(shapes, world_size, rank, unaligned):
    """[start, stop) of each tensor that `rank` has: by our layout, or cut anywhere at even places,
    some ranks having nothing of it.
    """
    if not unaligned:
        layout = flat_layout(shapes, world_size)
        mine = rank * layout.shard_numel, (rank + 1) * layout.shard_numel
        return [layout.overlap(index, mine) for index in range(len(shapes))]
    cuts = [0, *(37 * (r + 1) ** 2 * 2 for r in range(world_size - 1)), 10**9]
    sizes = [math.prod(shape) for shape in shapes]
    return [(min(cuts[rank], size), min(cuts[rank + 1], size)) for size in sizes]


def shards(xs, spans):
    """Of each tensor, as the function takes them: nothing is None with no place, or empty."""
    mains, starts = [], []
    for index, (x, (start, stop)) in enumerate(zip(xs, spans, strict=True)):
        none = start == stop and index % 2
        mains.append(None if none else x.reshape(-1)[start:stop].clone())
        starts.append(None if none else start)
    return mains, starts


def quantize_on_ranks(rank, world_size, blocks, shapes, unaligned):
    """The numbers of collectives; rank 0 compares the bits."""
    spans = spans_of(shapes, world_size, rank, unaligned)
    group = dist.group.WORLD if world_size > 1 else None
    counts = set()
    for dtype, bad in VALUES:
        xs = wholes(shapes, dtype, bad)
        made = [cleared(x, blocks) for x in xs]
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            align = {"align_numel": 2} if unaligned else {}
            quantize_param_shard(made, *shards(xs, spans), group, **align)
        counts.add(calls.call_count)
        if world_size > 1:
            merged(made)
        for x, one in zip(xs if rank == 0 else [], made, strict=rank == 0):
            expected = quantize(x, blocks)
            assert same(one.codes, expected.codes), (tuple(x.shape), dtype, bad)
            assert same(one.scales, expected.scales), (tuple(x.shape), dtype, bad)
            assert one.amax is None or same(one.amax, expected.amax), (tuple(x.shape), dtype, bad)
        assert bad is None or made[0].dequantize().isnan().any()
    return counts


def ranks_quantize(rank, world_size):
    for kind, blocks in BLOCKS.items():
        for name, shapes in (("odd", ODD), ("blocked", BLOCKED)):
            if kind == "nvfp4":
                shapes = [shape for shape in shapes if shape and shape[-1] % 2 == 0]
            for unaligned in (False, True):
                found = quantize_on_ranks(rank, world_size, blocks, shapes, unaligned)
                needless = world_size == 1 or (not unaligned and (kind, name) in UNCUT)
                assert found == {0 if needless else 1}, (kind, name, unaligned)


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_the_bits_of_one_rank_by_one_collective_at_most(world_size):
    run_on_ranks(ranks_quantize, world_size)


def test_alone_without_a_group():
    ranks_quantize(0, 1)


def ranks_delay(rank, world_size):
    state = DelayedScaling(History(length=4), 2)
    blocks = recipe_for("delayed").weight
    scales = []
    for step in range(3):
        xs = [torch.full((256, 3), 2.0**-step), torch.linspace(-4.0, 7.0, 700) * 2**step]
        spans = spans_of([x.shape for x in xs], world_size, rank, False)
        made = [cleared(x, blocks) for x in xs]
        group = dist.group.WORLD if world_size > 1 else None
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
            quantize_param_shard(made, *shards(xs, spans), group, scaling=state)
            update_scales([state])  # the amaxes are those of all ranks already
        assert calls.call_count == int(world_size > 1)
        if world_size > 1:
            merged(made)
        used = torch.tensor([448.0, 64.0] if step < 2 else [448.0, 32.0])
        for x, one, scale in zip(xs, made, used, strict=True):
            expected = quantize(x, blocks, scale=scale)
            assert same(one.codes, expected.codes), step
            assert same(one.scales, expected.scales), step
        scales.append(state.scales.tolist())
    if world_size > 1 and (others := dist.new_group([0])) and rank:
        for call in (
            lambda: update_scales(state, others),
            lambda: quantize_param_shard(made, *shards(xs, spans), others),
        ):
            with pytest.raises(ValueError, match="group: expected one that this rank is in"):
                call()
    return scales


def test_delayed_scales_of_all_ranks():
    expected = [[448.0, 64.0], [448.0, 32.0], [448.0, 16.0]]
    assert run_on_ranks(ranks_delay, 3) == [expected] * 3


def refused(error, words, targets, mains, starts, **options):
    before = [target.codes.view(torch.uint8).clone() for target in targets]
    with pytest.raises(error, match=words):
        quantize_param_shard(targets, mains, starts, None, **options)
    for target, codes in zip(targets, before, strict=True):
        assert torch.equal(target.codes.view(torch.uint8), codes)


def test_refusals():
    target = QuantizedTensor.empty((4, 64), BLOCKS["mxfp8"])
    x = torch.ones(256)
    refused(ValueError, "main_params: expected one per tensor, 1, got 0", [target], [], [0])
    refused(ValueError, "start_offsets: expected one per tensor", [target], [x], [])
    refused(
        ValueError, r"start_offsets\[0\]: expected 0 to 128, got 256", [target], [x[:128]], [256]
    )
    refused(ValueError, "begin and end at multiples of align_numel 128", [target], [x[:100]], [0])
    refused(ValueError, "begin and end at multiples", [target], [x[:100]], [28])
    refused(ValueError, "1-D", [target], [x.view(4, 64)], [0])
    refused(ValueError, "expected torch.float32", [target], [x.double()], [0])
    refused(TypeError, r"start_offsets\[0\]: expected an int", [target], [x], [None])
    refused(ValueError, "align_numel: expected 1 or more", [target], [x], [0], align_numel=0)
    pairs = QuantizedTensor.empty((4, 64), BLOCKS["nvfp4"])
    refused(ValueError, "a multiple of 2 for nvfp4", [pairs], [x], [0], align_numel=1)
    one = QuantizedTensor.empty((256,), BLOCKS["tensor"])
    state = DelayedScaling(History(), 1)
    refused(ValueError, "its 1 tensors, .* got 1 parameters, 0", [target], [x], [0], scaling=state)
    refused(ValueError, "its 1 tensors", [one, one], [x, x], [0, 0], scaling=state)
    with pytest.raises(TypeError, match="scaling: expected a DelayedScaling, got str"):
        quantize_param_shard([one], [x], [0], None, scaling="delayed")
    wider = DelayedScaling(History(), 1, element="e5m2")
    refused(ValueError, "one block of e5m2", [one], [x], [0], scaling=wider)
    with pytest.raises(TypeError, match="model_params: expected QuantizedTensors or Transformer"):
        quantize_param_shard([torch.ones(4)], [x], [0], None)


def test_tensors_of_transformer_engine_go_to_its_own_function(monkeypatch):
    seen = []
    kind = type("Float8Tensor", (), {"__module__": "transformer_engine.pytorch.tensor.float8"})
    theirs, ours = kind(), QuantizedTensor.empty((4, 64), BLOCKS["mxfp8"])
    x, y = torch.randn(256), torch.randn(10)
    utils = types.ModuleType("transformer_engine.pytorch.tensor.utils")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.tensor", types.ModuleType("t"))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    call = ([theirs, ours, theirs], [y, x, None], [3, 0, None], None)
    with pytest.raises(ImportError, match=r"install TransformerEngine 2\.2 or newer"):
        quantize_param_shard(*call)
    for name in ("cast_master_weights_to_fp8", "quantize_master_weights"):
        setattr(utils, name, lambda *args, name=name: seen.append((name, *args)))
        quantize_param_shard(*call)
        assert seen.pop() == (name, [theirs, theirs], [y, None], [3, None], None)
        assert same(ours.codes, quantize(x.view(4, 64), BLOCKS["mxfp8"]).codes)
