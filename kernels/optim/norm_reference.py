"""p-norms in plain PyTorch: their definition, the kernels' oracle, and the CPU path.

With M the largest |x|, each block of 128 elements of a tensor, its last one filled up with zeros,
gives s = sum((|x| / M)^p) in FP32, by halving (x[:64] + x[64:], ...), so that its bits depend on
the block alone. The sums are then added as integers, whose sum has no order::

    norm = M * (sum over blocks of s) ^ (1 / p)                    FP64, rounded once

s is cut into a high limb, floor(s * 2^26), and a low one, the next 33 bits; less than 2^-59 is left
out. s <= 128, so 2^30 blocks fit int64. Since M is divided by first, no finite element overflows.
A NaN makes a norm NaN, else an infinity infinite. So whoever splits tensors between blocks, over
launches or ranks, takes the maximum of M, adds the limbs, and gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

BLOCK_NUMEL = 128  # of the formula: bits would change with it, wherever tensors are aligned
HIGH_SCALE, LOW_SCALE = 2.0**26, 2.0**33
INFINITY_BITS, NAN_BITS = 0x7F800000, 0x7FC00000  # of FP32; all NaN count as this one

_TOGETHER_NUMEL = 1 << 18
"""Elements handled at once: the temporaries stay in a cache."""

Quantities = Sequence[Sequence[torch.Tensor]]
"""The tensors that each of several norms is of."""


def largest_magnitudes(quantities: Quantities, device: torch.device) -> torch.Tensor:
    """The bits, int32 [n], of the largest |x| of each quantity in FP32: as integers they are in
    the same order, infinity above all numbers and NaN above infinity.
    """
    zero = torch.zeros((), device=device)
    largest = [
        torch.stack([zero, *(_largest(tensor) for tensor in tensors if tensor.numel())]).amax()
        for tensors in quantities
    ]
    found = torch.stack(largest) if largest else zero.new_empty(0)
    return torch.where(found.isnan(), NAN_BITS, found.view(torch.int32))


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Of 500,000 FP32 on one core: 0.1 ms, where `vector_norm` of infinity takes 1.2 ms."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(high, -low).abs().float()


def power_sums(quantities: Quantities, largest: torch.Tensor, exponent: float) -> torch.Tensor:
    """The sums of all s, int64 [n, 2]: high and low limbs. Zero where `largest` is not finite."""
    limbs = torch.zeros(len(quantities), 2, dtype=torch.int64, device=largest.device)
    is_number = (largest > 0) & (largest < INFINITY_BITS)
    divisors = torch.where(is_number, largest.view(torch.float32), 1.0)
    for total, tensors, divisor, counts in zip(limbs, quantities, divisors, is_number, strict=True):
        for piece in _pieces(tensors):
            sums = _block_sums(piece, divisor, exponent)
            total += _limbs(torch.where(counts, sums, 0.0))
    return limbs


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The elements, FP32, 1-D, in whole blocks of one tensor each: small tensors come together."""
    waiting: list[torch.Tensor] = []
    numel = 0
    for tensor in tensors:
        for piece in tensor.reshape(-1).split(_TOGETHER_NUMEL):
            missing = -piece.numel() % BLOCK_NUMEL
            wide = piece.float()
            waiting.append(torch.nn.functional.pad(wide, (0, missing)) if missing else wide)
            numel += piece.numel()
            if numel >= _TOGETHER_NUMEL:
                yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                waiting, numel = [], 0
    if waiting:
        yield torch.cat(waiting)


def norms_of(
    largest: torch.Tensor, limbs: torch.Tensor | None, exponent: float, *, squared: bool = False
) -> torch.Tensor:
    """The norms [n], FP64, of what `largest_magnitudes` and `power_sums` found.

    limbs: `None` where `exponent` is infinite. squared: the sum of the powers, without the root.
    """
    numbers = largest.view(torch.float32).double()
    if limbs is None:
        return numbers
    total = (limbs[:, 0].double() + limbs[:, 1].double() / LOW_SCALE) / HIGH_SCALE
    norms = numbers.pow(exponent) * total if squared else numbers * total.pow(1.0 / exponent)
    return torch.where(largest < INFINITY_BITS, norms, numbers)


def l2_norm_(
    norm: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    found_inf: torch.Tensor | None,
    squared: bool,
) -> None:
    """norm = root of the sum of squares; found_inf = whether an element is NaN or infinite."""
    largest = largest_magnitudes([tensors], norm.device)
    fill_norm_(norm, found_inf, largest, power_sums([tensors], largest, 2.0), squared=squared)


def fill_norm_(
    norm: torch.Tensor,
    found_inf: torch.Tensor | None,
    largest: torch.Tensor,
    limbs: torch.Tensor,
    *,
    squared: bool,
) -> None:
    """The end of `l2_norm_`, on any device."""
    norm.copy_(norms_of(largest, limbs, 2.0, squared=squared).view_as(norm))
    if found_inf is not None:
        found_inf.copy_((largest >= INFINITY_BITS).view_as(found_inf))


def _block_sums(piece: torch.Tensor, divisor: torch.Tensor, exponent: float) -> torch.Tensor:
    """s of each block of `piece`, FP32."""
    terms = (piece / divisor).view(-1, BLOCK_NUMEL)
    terms = terms.mul_(terms) if exponent == 2.0 else terms.abs_().pow_(exponent)
    width = BLOCK_NUMEL
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0]


def _limbs(sums: torch.Tensor) -> torch.Tensor:
    """The sum of FP32 `sums` as two limbs, int64 [2]: products and differences are exact."""
    scaled = sums * HIGH_SCALE
    high = scaled.floor()
    low = ((scaled - high) * LOW_SCALE).floor()
    return torch.stack([high.long().sum(), low.long().sum()])
