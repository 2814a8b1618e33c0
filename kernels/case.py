"""What a case of an op is: its tensors, its call, the bytes it must move, and what it may cost.

    Row        an op as docs/kernels.md has it
    Case       one op on one kind of tensors and options, of any size, under one name
    Operands   the tensors of one size, by what the op does with them
    Gate       limits of what the compiler makes of a case for one target

Everything that lists the kernels reads the same cases, `cases.cases()`: the gates and `sidestream
inspect`, the benchmark, the tuner, the sanitizers, the documentation. So a case tells as little as
it can. Its definition is the same call on a CPU. What is compiled for it is what that call would
launch on a GPU, which `launches` records.

The bytes of a case are what any implementation must move: every input read once, or once a pass
where the op cannot know enough earlier, every output written once, and read once where it
accumulates. Scalars do not count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import tuned
from .ahead.count import Path, full_path
from .formats.table import WIRE_FORMATS
from .launch import THREADS_PER_WARP, Launch, LaunchConfig, recorded
from .op import launching_on_cpu

if TYPE_CHECKING:
    from .ahead.compile import Instruction

GATED_TARGET = "sm_90"
"""What gates are for; the limits elsewhere follow from `ahead.counted`."""
FP4_SHARE = 0.70
STOCHASTIC_SHARE = 0.60
RECORDED_NUMEL = 1 << 16
SEED = 0
DTYPES = {form.name: form.dtype for form in WIRE_FORMATS}
_MANY = 1 << 28  # elements among which headers and padding do not show

Count = Callable[[Sequence["Instruction"], float], Path]
"""Finds the path of full tiles in code by the bytes that a thread moves; raises `CountError`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op, `torch.ops.sidestream.<op>`, behind the public `function`.

    moved: bytes an element. proof: what its bits, or values, are compared with. copy_share: the
    part of the rate of a copy that large sizes are to reach on a GPU, a target until measured.
    """

    op: str
    function: str
    formats: str
    moved: str
    rounding: str
    proof: str
    source: str
    copy_share: float | None

    def share_of(self, *, fp4: bool = False, stochastic: bool = False) -> float | None:
        """The target of a case: to e2m1, or with noise, arithmetic takes the time of bytes."""
        if self.copy_share is None:
            return None
        limits = (STOCHASTIC_SHARE if stochastic else 1.0, FP4_SHARE if fp4 else 1.0)
        return min(self.copy_share, *limits)


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits of one case, compiled for one target, `GATED_TARGET` in a `Case`: it never spills.

    instructions: an element, in the final machine code of the path of full tiles, None where that
    path cannot be told apart. registers: of a thread. Both leave room above what Triton 3.6 and 3.7
    make, about half an instruction, since each release brings another compiler.
    """

    instructions: float | None
    registers: int = 64


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

    def results(self, returned: object = None) -> list[torch.Tensor]:
        """What a call that returned this has made: by default what it leaves changed."""
        if returned is None:
            return [*self.written, *self.updated]
        return list(returned) if isinstance(returned, tuple) else [returned]  # type: ignore[list-item]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op on one kind of tensors and options. A size is asked for; `numel(asked)` it becomes.

    name: unique within the op. format, dtype, world: what options select it by. make: the tensors,
    on a device. call: the public function on them; returns its results, or None where it leaves
    them in the operands; with noise it takes the `first_index` of one tensor too. num_bytes: the
    cost model of the size asked for, `passes` times over what is read. count: finds the path of
    full tiles, None where there is none. counted: which of its launches is counted, the others
    being small, or an earlier pass. recorded_numel: a size of whole tiles, so that nothing else is
    compiled where the launcher leaves it out. copy_share: the part of a copy's rate that it is to
    reach on a GPU. standard: measured where nobody asks for formats or dtypes.
    """

    op: str
    name: str
    format: str
    dtype: str
    make: Callable[[torch.device, int], Operands]
    call: Callable[..., object]
    numel: Callable[[int], int]
    num_bytes: Callable[[int], int]
    world: int | None = None
    passes: int = 1
    gate: Gate | None = None
    count: Count | None = full_path
    counted: int = 0
    recorded_numel: int = RECORDED_NUMEL
    copy_share: float | None = None
    standard: bool = False

    @property
    def full_name(self) -> str:
        """The op and the name, for a person."""
        return f"{self.op.rstrip('_')} {self.name}"

    @property
    def moved_bytes(self) -> float:
        """Bytes an element; of a sum over ranks, an element of the result."""
        return self.num_bytes(_MANY) / self._summed(_MANY)

    def operands(self, device: torch.device, numel: int) -> Operands:
        """The same tensors at every call."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(SEED)
            return self.make(device, numel)

    def results(self, operands: Operands, **options: int) -> list[torch.Tensor]:
        """What one call makes."""
        return operands.results(self.call(operands, **options))

    def agrees(self, device: torch.device, numel: int) -> bool:
        """Whether the call on `device` makes the bits of the definition, the call on a CPU."""
        expected = self.operands(torch.device("cpu"), numel)
        found = expected.copied(device)
        return same(self.results(found), self.results(expected))

    def launches(
        self, numel: int | None = None, config: LaunchConfig | None = None
    ) -> tuple[Launch, ...]:
        """What a call of this size would launch, by default or with a launch configuration."""
        return self._recorded(numel, config)[0]

    def tuned(self) -> Mapping[str, LaunchConfig]:
        """What the launcher looks for in a table of tuned configurations, and its defaults."""
        limits = tuned.LIMITS.get(self.op)
        if limits is None:
            return {}
        return self._recorded(None, LaunchConfig(limits.min_block_bytes, 1))[1]

    def elements_per_thread(self, launch: Launch) -> float:
        """Elements that a thread of the launch handles, of those of `recorded_numel`.

        Blocks are powers of two, so a program more for a message's frame does not show.
        """
        share = self._summed(self.recorded_numel) / launch.programs
        return 2 ** math.ceil(math.log2(share)) / (launch.num_warps * THREADS_PER_WARP)

    def _recorded(
        self, numel: int | None, config: LaunchConfig | None
    ) -> tuple[tuple[Launch, ...], Mapping[str, LaunchConfig]]:
        """The launches, and if `config` was forced, what tables were asked for."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(launching_on_cpu())
            with recorded():  # what is in them does not matter
                operands = self.operands(torch.device("cpu"), numel or self.recorded_numel)
            forced = None
            if config is not None:
                forced = stack.enter_context(tuned.forcing(self.op, config))
            record = stack.enter_context(recorded())
            self.call(operands)
        return tuple(record), {} if forced is None else forced.asked

    def _summed(self, numel: int) -> int:
        """Elements, where many become one those of the result."""
        return self.numel(numel) // (self.world or 1)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all bytes are equal, on whatever devices."""
    return all(
        torch.equal(one.cpu().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )
