"""Owns what a case of the kernel benchmark is, on any device: an op, its tensors, bytes, rivals.

    Case       one op on one kind of tensors, of any size
    Operands   the tensors of one size, by what the op does with them; copied to rotate them
    Bind       operands -> a call without arguments; views, offsets and buffers are made here,
               outside of the clock

The bytes of a case are what any implementation must move: every input read once, or once a pass
where the op cannot know enough earlier, every output written once, and read once where it
accumulates. A candidate's rate is those bytes by its time, so passes that a rival makes too many
show as a lower rate. Scalars do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

ALIGNMENT_NUMEL = 128
OURS = "sidestream"
SEED = 0

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Meta, Llama 3 8B: hidden size 4096, 8 key/value heads of 128, intermediate size 14336.
_SQUARE, _GROUPED, _WIDE = (4096, 4096), (1024, 4096), (14336, 4096)
LLAMA_BLOCK: tuple[tuple[int, ...], ...] = (
    *(_SQUARE, _GROUPED, _GROUPED, _SQUARE),
    *(_WIDE, _WIDE, _WIDE[::-1]),
    *((4096,), (4096,)),
)
_DIM_MULTIPLE = 8

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """What one call works on. `updated` is read and written; `scalars` are a few bytes each."""

    read: Sequence[torch.Tensor] = ()
    written: Sequence[torch.Tensor] = ()
    updated: Sequence[torch.Tensor] = ()
    scalars: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        # One type, whatever was passed: compiled code is for that and no other.
        for name in ("read", "written", "updated", "scalars"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def copied(self, device: torch.device | str | None = None) -> Operands:
        """The same values in memory of their own, on `device` where it is given."""

        def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor.to(device or tensor.device, copy=True) for tensor in tensors]

        return Operands(
            read=copies(self.read),
            written=copies(self.written),
            updated=copies(self.updated),
            scalars=copies(self.scalars),
        )

    def num_bytes(self, passes: int) -> int:
        """Counted from the tensors: what `passes` over the inputs must move."""
        counts = ((self.read, passes), (self.written, 1), (self.updated, 2))
        return sum(tensor.nbytes * times for tensors, times in counts for tensor in tensors)

    @property
    def footprint_bytes(self) -> int:
        """The memory that they lie in, however often each is read or written."""
        tensors = (*self.read, *self.written, *self.updated, *self.scalars)
        return sum(tensor.nbytes for tensor in tensors)

    def results(self) -> list[torch.Tensor]:
        """What a call leaves changed."""
        return [*self.written, *self.updated]


Bind = Callable[[Operands], Run]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op on one kind of tensors. Sizes are asked for: `numel(asked)` elements is what it gets.

    num_bytes: the op's cost model, of the size asked for; `passes` times over what is read.
    definition: what the result is, in plain PyTorch; its bits are what the gate compares with.
    Both `ours` and `definition` may return their results instead of leaving them in the operands.
    rivals: an ImportError while binding one says what is not installed. uncaptured: those whose
    calls leave a CUDA graph with pinned memory that is freed before the graph runs again. plain:
    what one writes without a kernel, for torch.compile; its bits need not be ours. target: the part
    of a copy's rate that ours is to reach on a GPU. standard: measured where nobody asks for
    formats or dtypes.
    """

    name: str
    op: str
    format: str
    dtype: str
    numel: Callable[[int], int]
    num_bytes: Callable[[int], int]
    make: Callable[[torch.device, int], Operands]
    ours: Bind
    definition: Callable[[Operands], object]
    world: int | None = None
    passes: int = 1
    rivals: Mapping[str, Bind] = field(default_factory=dict)
    uncaptured: frozenset[str] = frozenset()
    plain: Bind | None = None
    target: float | None = None
    standard: bool = True

    @property
    def candidates(self) -> dict[str, Bind]:
        """Ours first, then the rivals."""
        return {OURS: self.ours, **self.rivals}

    def operands(self, device: torch.device, numel: int) -> Operands:
        """The same tensors at every call."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(SEED)
            return self.make(device, numel)

    def agrees(self, device: torch.device, numel: int) -> bool:
        """Whether ours, as it is timed, makes the bits of the definition on the CPU."""
        expected = self.operands(torch.device("cpu"), numel)
        found = expected.copied(device)
        return same(
            made(self.ours(found)(), found),
            made(self.definition(expected), expected),
        )


def as_bind(function: Callable[[Operands], object]) -> Bind:
    """`function` as a candidate."""
    return lambda operands: lambda: function(operands)


def made(returned: object, operands: Operands) -> list[torch.Tensor]:
    """The results of a call: what it returned, or where it returned nothing, what it changed."""
    if returned is None:
        return operands.results()
    return list(returned) if isinstance(returned, tuple) else [returned]  # type: ignore[list-item]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all bytes are equal, on whatever devices."""
    return all(
        torch.equal(one.cpu().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )


def block_shapes(numel: int) -> tuple[tuple[int, ...], ...]:
    """The tensors of a Llama 3 8B block, made narrower so that they have about `numel` elements."""
    whole = sum(torch.Size(shape).numel() for shape in LLAMA_BLOCK)
    factor = (numel / whole) ** 0.5
    return tuple(
        tuple(max(1, round(size * factor / _DIM_MULTIPLE)) * _DIM_MULTIPLE for size in shape)
        for shape in LLAMA_BLOCK
    )


def block_numel(numel: int) -> int:
    """The elements of all of `block_shapes(numel)`."""
    return sum(torch.Size(shape).numel() for shape in block_shapes(numel))


def offsets_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where aligned tensors lie one after the other, and where the last one ends."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
    return offsets, end
