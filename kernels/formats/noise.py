"""The noise of stochastic rounding: 32 random bits for an element, from seed and index alone.

    words     = Philox4x32-7(key = (seed low, seed high), counter = (group low, group high, 0, 0))
    noise(i)  = words[(i // 4) % 4] rotated right by 8 * (i % 4) bits,       group = i // 16

Here i is the element's index in the whole tensor, so that tile sizes, launch configurations and
sharding change nothing. One Philox call serves 16 elements: each has 8 bits of its own on top, the
most significant, and below them the bits of the three elements that share its word. So every
element's 32 bits are uniform and its rounding is unbiased to the last bit. What sharing costs: two
elements of one word round up together with a covariance of up to 1/1024, a quarter of the 1/256
of cases in which the top eight bits tie and the lower ones matter.

Philox: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11, 2011;
seven rounds are the fewest that pass BigCrush (table 2 there).
"""

from __future__ import annotations

import torch

from ..checks import check_choice, check_integer, check_one

ROUNDINGS = ("nearest", "stochastic")
MAX_INDEX = 2**63 - 1  # of an element in its whole tensor, as ops and kernels take integers
PHILOX_ROUNDS = 7
GROUP_NUMEL = 16  # elements that share one Philox call

Seed = int | torch.Tensor
"""64 bits, as an integer from -2^63 to 2^64 - 1, or an int64 tensor of one element."""

LOW_32 = 0xFFFF_FFFF
KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)


def signed_seed(seed: int) -> int:
    """The same 64 bits from -2^63 to 2^63 - 1, as the schemas of ops and kernels take integers."""
    return (seed + 2**63) % 2**64 - 2**63


def checked_seed(rounding: str, seed: Seed | None, device: torch.device) -> Seed | None:
    """The seed to round stochastically with, signed or a tensor; `None` to round to nearest.

    Raises `ValueError` where `rounding` and `seed` do not go together or are not what they may be:
    a tensor is int64, of one element, on `device`.
    """
    check_choice("rounding", rounding, ROUNDINGS)
    if (rounding == "stochastic") != (seed is not None):
        raise ValueError(
            f"seed: expected {'an integer' if seed is None else 'None'} with {rounding!r} "
            f"rounding, got {'a tensor' if isinstance(seed, torch.Tensor) else seed}; a seed goes "
            "with 'stochastic', and with that alone"
        )
    if isinstance(seed, torch.Tensor):
        check_one("seed", seed, (torch.int64,), device)
    elif seed is not None:
        seed = signed_seed(check_integer("seed", seed, -(2**63), 2**64 - 1))
    return seed


def check_first_index(first_index: int, numel: int) -> None:
    """Raise unless the elements from `first_index` on, `numel` of them, all have an index."""
    check_integer("first_index", first_index, 0, MAX_INDEX - numel)


def noise_bits(
    seed: Seed, first_index: int, numel: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The noise of elements [first_index, first_index + numel): int32 [numel], all 32 bits random.

    seed: any 64 bits; a tensor lies on `device`. Raises `ValueError` for a negative `first_index`
    or `numel`, and for indices that exceed `MAX_INDEX`.
    """
    check_integer("numel", numel, 0)
    check_first_index(first_index, numel)
    first_group = first_index // GROUP_NUMEL
    last_group = -(-(first_index + numel) // GROUP_NUMEL)
    groups = torch.arange(first_group, last_group, dtype=torch.int64, device=device)
    words = torch.stack(philox(seed, groups), dim=1)
    shifts = torch.arange(0, 32, 8, device=device)
    doubled = words | (words << 32)
    rotated = (doubled[:, :, None] >> shifts).to(torch.int32)
    start = first_index - first_group * GROUP_NUMEL
    return rotated.view(-1)[start : start + numel]


def philox(seed: Seed, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four 32-bit words of each group, as int64 from 0 to 2^32 - 1; `groups`: int64, >= 0."""
    keys = [seed & LOW_32, (seed >> 32) & LOW_32]
    zero = torch.zeros_like(groups)
    c0, c1, c2, c3 = groups & LOW_32, groups >> 32, zero, zero
    for _ in range(PHILOX_ROUNDS):
        # A product of two 32-bit numbers may wrap int64 around; its 64 bits are right even so.
        product_0, product_2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product_2 >> 32) & LOW_32) ^ c1 ^ keys[0]
        c2 = ((product_0 >> 32) & LOW_32) ^ c3 ^ keys[1]
        c1, c3 = product_2 & LOW_32, product_0 & LOW_32
        keys = [(key + step) & LOW_32 for key, step in zip(keys, KEY_STEPS, strict=True)]
    return c0, c1, c2, c3
