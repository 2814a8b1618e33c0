"""The kernels' naive definition, the cases they are tried on, and the comparison of bits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CANARY = 1.5  # what is around the intervals of a flat buffer and must stay there
# Zeros, ties and near-ties of bf16 and fp16, subnormals, overflow to infinity, infinities, NaN.
SPECIAL = [0.0, -0.0, 1.00390625, 1.01171875, 1.0039063, -1.00390625, 1.00048828125, 1.00146484375]
SPECIAL += [1e-40, -1e-45, 5.9e-8, 2.9e-8, 65504.0, 65519.996, 65520.0, 3.3895314e38, 3.4028235e38]
SPECIAL += [float("inf"), float("-inf"), float("nan")]


def naive_pack(flat, tensors, offsets, scale=1.0, accumulate=False):
    result = flat.clone()
    for tensor, offset in zip(tensors, offsets, strict=True):
        interval = slice(offset, offset + tensor.numel())
        result[interval] = naive_move(flat[interval], tensor.reshape(-1), scale, accumulate)
    return result


def naive_unpack(tensors, flat, offsets, scale=1.0, accumulate=False):
    results = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        source = flat[offset : offset + tensor.numel()].reshape(tensor.shape)
        results.append(naive_move(tensor, source, scale, accumulate))
    return results


def naive_move(old, source, scale, accumulate):
    moved = source.float() * torch.full_like(source, scale, dtype=torch.float32)
    if accumulate:
        moved = old.float() + moved
    return moved.to(old.dtype)


def naive_reduce(out, parts, scale=1.0, accumulate=False):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return naive_move(out, total, scale, accumulate)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`assert_same_bits`, or where an element is one byte, the same bytes: on any devices."""
    if expected.element_size() == 1:
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.detach().cpu().view(torch.uint8), expected.view(torch.uint8))
    else:
        assert_same_bits(actual, expected)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the last bit and the sign of zero; any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    integer = torch.int32 if actual.element_size() == torch.int32.itemsize else torch.int16
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    bits, expected_bits = (x.contiguous().view(-1).view(integer) for x in (actual, expected))
    both_nan = (actual.isnan() & expected.isnan()).reshape(-1)
    wrong = ((bits != expected_bits) & ~both_nan).nonzero().view(-1)
    assert wrong.numel() == 0, (
        f"{wrong.numel()} of {actual.numel()} differ, first at {wrong[:8].tolist()}: "
        f"{actual.reshape(-1)[wrong[:8]].tolist()} for "
        f"{expected.reshape(-1)[wrong[:8]].tolist()}"
    )


def values(numel: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> torch.Tensor:
    """Random bit patterns in the middle of FP32's range, with the special values strewn in."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.randn(numel, generator=generator)
    result *= torch.exp2(torch.randint(-18, 12, (numel,), generator=generator).float())
    chosen = torch.randperm(numel, generator=generator)[: min(len(SPECIAL), numel // 2)]
    result[chosen] = torch.tensor(SPECIAL)[: len(chosen)]
    return result.to(dtype).to(device)


@dataclass
class Case:
    """Tensors, a flat buffer filled with values, and the place of each tensor in it."""

    flat: torch.Tensor
    tensors: list[torch.Tensor]
    offsets: list[int]


def make_case(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    flat_dtype: torch.dtype,
    *,
    align: int = 128,
    transposed: Sequence[int] = (),
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Tensors of `shapes`, dtypes in turn, in shuffled order, each after a gap of canaries.

    Offsets are multiples of `align`; 2-D tensors whose index is in `transposed` are not contiguous.
    """
    tensors = []
    for index, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        tensor = values(numel, dtypes[index % len(dtypes)], seed + index, device)
        if index in transposed:
            tensors.append(tensor.view(shape[::-1]).t())
        else:
            tensors.append(tensor.view(shape))
    offsets, end = [0] * len(tensors), 0
    for index in random.Random(seed).sample(range(len(tensors)), len(tensors)):
        offsets[index] = -(-(end + 1) // align) * align
        end = offsets[index] + tensors[index].numel()
    flat = torch.full((end + 130,), CANARY, dtype=flat_dtype, device=device)
    for tensor, offset in zip(tensors, offsets, strict=True):
        numel = tensor.numel()
        flat[offset : offset + numel] = values(numel, flat_dtype, seed + offset + 1, device)
    return Case(flat, tensors, offsets)


def check_pack(pack_, case: Case, scale: float, accumulate: bool) -> None:
    """Pack with `pack_` and with the definition, the canaries compared as well."""
    expected = naive_pack(case.flat, case.tensors, case.offsets, scale, accumulate)
    flat = case.flat.clone()
    pack_(flat, case.tensors, case.offsets, scale, accumulate)
    assert_same_bits(flat, expected)


def check_unpack(unpack_, case: Case, scale: float, accumulate: bool) -> None:
    """Unpack with `unpack_` and with the definition, into tensors strided like the case's."""
    expected = naive_unpack(case.tensors, case.flat, case.offsets, scale, accumulate)
    flat = case.flat.clone()
    tensors = [torch.empty_like(t).copy_(t) for t in case.tensors]
    unpack_(tensors, flat, case.offsets, scale, accumulate)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, wanted)
    assert_same_bits(flat, case.flat)


def check_reduce(reduce_, world, shard, dtypes, scale, accumulate, *, start=0, device="cpu"):
    """Reduce inside larger memory that starts `start` elements late, canaries on both sides."""
    part_dtype, out_dtype = dtypes
    memory = values(start + world * shard, part_dtype, seed=world, device=device)
    parts = memory[start:].view(world, shard)
    around = torch.full((start + shard + 130,), CANARY, dtype=out_dtype, device=device)
    out = around[start : start + shard]
    out.copy_(values(shard, out_dtype, seed=shard, device=device))
    expected = around.clone()
    expected[start : start + shard] = naive_reduce(out, parts, scale, accumulate)
    reduce_(out, parts, scale, accumulate)
    assert_same_bits(around, expected)
