"""What can be tuned, and what the search asks of the compiler and of a GPU.

    Tunable     a case of the benchmark under the name that its launcher looks for in a table
    candidates  warps, and blocks of 1, 2 or 4 accesses of 16 bytes a thread; the default first
    look        compiles a candidate ahead of time: registers, spills, occupancy; needs no GPU
    Workbench   one tunable on a GPU: whether a candidate is right, and how long a call takes

For kernels that are bound by memory the optimum is flat: bytes in flight decide, and warps times
accesses are those. Candidates of which the same is launched are one, such as blocks of all sizes
where the result has blocks of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..kernels import LaunchConfig, tuned
from ..kernels.ahead.compile import TARGETS
from ..kernels.ahead.measure import by_processes, measure
from ..kernels.case import Case, Operands
from ..kernels.cases import case_of, cases
from ..kernels.launch import ACCESS_BYTES, THREADS_PER_WARP
from .ahead.measuring import occupancy_of
from .clocks import Clock, Ticker, rotation_of
from .kernel_cases.competitors import ours
from .kernel_table import GATE_NUMEL
from .op_names import ops_named
from .sweep import NotTimedError, size_of

T = TypeVar("T")

WARPS = (2, 4, 8, 16)
ACCESSES = (1, 2, 4)
# Resident warps by the most there can be, below which a candidate is not tried. With two accesses
# of 16 bytes in flight a thread, a quarter of 64 warps is 16 KiB, which 3 TB/s at 0.7 us need.
MIN_OCCUPANCY = 0.25


@dataclass(frozen=True)
class Tunable:
    """What a table may have an entry for. case: measures it; key: its name there."""

    case: Case
    key: str
    default: LaunchConfig

    @property
    def op(self) -> str:
        """The op's name."""
        return self.case.op

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.op} {self.key}"

    def candidates(self) -> tuple[LaunchConfig, ...]:
        """The default, then all others that a table may hold, small blocks first."""
        legal = (config for config in _grid(self.op) if tuned.illegal(self.op, config) is None)
        nearest = sorted(legal, key=lambda config: config.block_bytes != self.default.block_bytes)
        found: dict[object, LaunchConfig] = {}
        for config in (self.default, *nearest):
            launched = tuple(
                (one.kernel, one.programs, one.num_warps, tuple(one.constants.items()))
                for one in self.case.launches(config=config)
            )
            found.setdefault(launched, config)
        return (self.default, *sorted(set(found.values()) - {self.default}, key=size_of))


def _grid(op: str) -> Iterator[LaunchConfig]:
    limits = tuned.LIMITS[op]
    for num_warps in WARPS:
        if limits.min_block_bytes == limits.max_block_bytes:
            yield LaunchConfig(limits.min_block_bytes, num_warps)
            continue
        for accesses in ACCESSES:
            yield LaunchConfig(num_warps * THREADS_PER_WARP * ACCESS_BYTES * accesses, num_warps)


@functools.cache
def tunables() -> tuple[Tunable, ...]:
    """One for each name that the launchers of the standard cases look for, of BF16 if it can be."""
    found: dict[tuple[str, str], Tunable] = {}
    standard = [case for case in cases() if case.standard]
    for case in sorted(standard, key=lambda case: case.dtype != "bf16"):
        for key, default in case.tuned().items():
            found.setdefault((case.op, key), Tunable(case, key, default))
    order = list(tuned.LIMITS)
    return tuple(sorted(found.values(), key=lambda one: order.index(one.op)))


def select(ops: Iterable[str] | None) -> list[Tunable]:
    """The tunables of the ops called `ops`; None is all.

    Raises:
        UsageError: an op that is not known, or has nothing to tune.
    """
    found = tunables()
    if ops is None:
        return list(found)
    wanted = ops_named(ops, (one.op for one in found))
    return [one for one in found if one.op in wanted]


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler made of one candidate. spill_bytes: of a thread; occupancy: 0 to 1,
    None where the compiler does not say.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    occupancy: float | None

    @property
    def reason(self) -> str | None:
        """Why it is not worth trying; None where it is."""
        if self.spill_bytes:
            return f"spills {self.spill_bytes} bytes"
        if self.occupancy is not None and self.occupancy < MIN_OCCUPANCY:
            return f"occupancy {self.occupancy:.0%}"
        return None


def target_of(device: torch.device) -> str:
    """What to compile for in the place of `device`: it, or the nearest earlier one of NVIDIA's."""
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    known = [int(name[3:]) for name in TARGETS if name.startswith("sm_")]
    return f"sm_{max((arch for arch in known if arch <= 10 * major + minor), default=min(known))}"


Look = Resources | str
"""What was found of a candidate, or that it does not compile."""
Task = tuple[str, str, LaunchConfig, str]
"""Op, name of the case, candidate and target."""


def look(task: Task) -> Look:
    """Compile a candidate, unless that has been done before."""
    op, name, config, target = task
    try:
        measured = measure(case_of(op, name), target, config)
    except Exception as error:  # noqa: BLE001 - compilers refuse in many ways
        return f"not compiled: {_root(error)}"
    return Resources(
        measured.registers,
        measured.spill_bytes,
        measured.shared_bytes,
        occupancy_of(measured, target),
    )


def _root(error: BaseException) -> str:
    """The end of the first error: Triton tells of where it was first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().rpartition("\n")[2] or type(error).__name__


def look_at_all(
    tasks: Sequence[Task],
    num_processes: int,
    on_look: Callable[[Task], None],
    is_over: Callable[[], bool] = lambda: False,
) -> dict[Task, Look]:
    """What is found of each, in the order of the tasks, until it `is_over`."""
    found: dict[Task, Look] = {}
    for task, one in by_processes(look, tasks, num_processes):
        found[task] = one
        on_look(task)
        if is_over():
            break
    return {task: found[task] for task in tasks if task in found}


def reason(found: Look | None) -> str | None:
    """Why a candidate is not worth trying; None where it is, or was not looked at."""
    return found.reason if isinstance(found, Resources) else found


class Workbench:
    """One tunable on `device`, with about `numel` elements.

    What a kernel changes in place is changed on operands of the gate's own, made anew for every
    candidate, and on the clock's.
    """

    def __init__(self, tunable: Tunable, numel: int, device: torch.device, clock: Clock) -> None:
        self._tunable = tunable
        self._numel = numel
        self._device = device
        self._clock = clock
        self._tickers: dict[LaunchConfig, Ticker] = {}

    def fault(self, config: LaunchConfig) -> str | None:
        """What is wrong with the candidate's result; None where every bit is right."""
        case, numel = self._tunable.case, min(self._numel, GATE_NUMEL)
        try:
            agrees = self._forced(config, lambda: case.agrees(self._device, numel))
        except Exception as error:  # noqa: BLE001 - a kernel that cannot run is as wrong as any
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return None if agrees else "wrong result"

    def sample(self, config: LaunchConfig) -> float:
        """Seconds of one call.

        Raises:
            NotTimedError: the memory of the device is full, or it is not timed as others were.
        """
        try:
            if config not in self._tickers:
                rotated = self._rotated  # made by launches like any other
                runs = {self._tunable.name: [ours(self._tunable.case)(one) for one in rotated]}
                made = self._forced(config, lambda: self._clock.tickers(runs))
                self._tickers[config] = made[self._tunable.name]
            ticker, first = self._tickers[config], next(iter(self._tickers.values()))
            if ticker.method != first.method:
                raise NotTimedError(f"timed by {ticker.method}, others by {first.method}")
            # A graph that is replayed asks for nothing.
            with tuned.forcing(self._tunable.op, config):
                return ticker.sample()
        except torch.OutOfMemoryError:
            raise NotTimedError("out of memory") from None

    @functools.cached_property
    def _rotated(self) -> list[Operands]:
        first = self._tunable.case.operands(self._device, self._numel)
        return rotation_of(first, self._clock.cache_bytes)

    def _forced(self, config: LaunchConfig, work: Callable[[], T]) -> T:
        """Do `work` with the candidate; its launches must be of the tunable's case and default."""
        tunable = self._tunable
        with tuned.forcing(tunable.op, config) as forced:
            result = work()
        if forced.asked != {tunable.key: tunable.default}:
            raise RuntimeError(
                f"{tunable.name}: expected launches of that case, by default {tunable.default}, "
                f"got {forced.asked}; correct `tunables`"
            )
        return result
