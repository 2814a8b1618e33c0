"""Owns what the search for launch configurations asks of the compiler and of a GPU.

    look        compiles a candidate ahead of time: registers, spills, occupancy; needs no GPU
    Workbench   one tunable on a GPU: whether a candidate is right, and how long a call takes

What a kernel changes in place is changed on copies: the gate makes its operands anew for every
candidate, and the clock's are nobody else's.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..kernels import LaunchConfig, tuned
from ..kernels.ahead import Configuration
from ..kernels.ahead import compile as aot
from .ahead.machines import amd_occupancy, occupancy
from .ahead.measuring import MIN_CASES_A_PROCESS
from .clocks import Clock, Ticker, rotation_of
from .kernel_cases.case import Operands, made, same
from .kernel_table import GATE_NUMEL
from .sweep import NotTimedError
from .tunables import Tunable, tunable

T = TypeVar("T")


# Resident warps by the most there can be, below which a candidate is not tried. With two accesses
# of 16 bytes in flight a thread, a quarter of 64 warps is 16 KiB, which 3 TB/s at 0.7 us need.
MIN_OCCUPANCY = 0.25


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


def resources_of(configuration: Configuration, target: str) -> Resources:
    """Of a kernel compiled for one of `ahead.compile.TARGETS`."""
    compiled = configuration.compile(target)
    if aot.TARGETS[target].backend == "cuda":
        share: float | None = occupancy(
            target, compiled.registers, compiled.shared_bytes, configuration.num_warps
        )
    else:
        share = amd_occupancy(compiled.assembly)
    return Resources(compiled.registers, compiled.spill_bytes, compiled.shared_bytes, share)


def target_of(device: torch.device) -> str:
    """What to compile for in the place of `device`: it, or the nearest earlier one of NVIDIA's."""
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    known = [int(name[3:]) for name in aot.TARGETS if name.startswith("sm_")]
    return f"sm_{max((arch for arch in known if arch <= 10 * major + minor), default=min(known))}"


Look = Resources | str
"""What was found of a candidate, or that it does not compile."""
Task = tuple[str, str, LaunchConfig, str]
"""Op, case, candidate and target."""


def look(task: Task) -> Look:
    """Compile a candidate."""
    op, case, config, target = task
    try:
        return resources_of(tunable(op, case).compiled(config), target)
    except Exception as error:  # noqa: BLE001 - compilers refuse in many ways
        return f"not compiled: {_root(error)}"


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
    """What is found of each, in the order of the tasks, until it `is_over`; by processes, since
    Python's parser, by which Triton reads kernels, is not for two threads.
    """
    num_processes = min(num_processes, len(tasks) // MIN_CASES_A_PROCESS)
    found: dict[Task, Look] = {}
    if num_processes <= 1:
        for task in tasks:
            if is_over():
                break
            found[task] = look(task)
            on_look(task)
        return found
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context)
    try:
        futures = {task: pool.submit(look, task) for task in tasks}
        for task, future in futures.items():
            if is_over():
                break
            found[task] = future.result()
            on_look(task)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def reason(found: Look | None) -> str | None:
    """Why a candidate is not worth trying; None where it is, or was not looked at."""
    return found.reason if isinstance(found, Resources) else found


class Workbench:
    """One tunable on `device`, with about `numel` elements."""

    def __init__(self, tunable: Tunable, numel: int, device: torch.device, clock: Clock) -> None:
        self._tunable = tunable
        self._case = tunable.benchmark
        self._numel = numel
        self._device = device
        self._clock = clock
        self._tickers: dict[LaunchConfig, Ticker] = {}

    def fault(self, config: LaunchConfig) -> str | None:
        """What is wrong with the candidate's result; None where every bit is right."""
        operands, expected = self._expected
        mine = operands.copied(self._device)
        try:
            found = self._forced(config, lambda: made(self._case.ours(mine)(), mine))
        except Exception as error:  # noqa: BLE001 - a kernel that cannot run is as wrong as any
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return None if same(found, expected) else "wrong result"

    @functools.cached_property
    def _expected(self) -> tuple[Operands, list[torch.Tensor]]:
        """The operands on the CPU as they are before a call, and what the definition makes."""
        operands = self._case.operands(torch.device("cpu"), min(self._numel, GATE_NUMEL))
        changed = operands.copied()
        return operands, made(self._case.definition(changed), changed)

    def sample(self, config: LaunchConfig) -> float:
        """Seconds of one call.

        Raises:
            NotTimedError: the memory of the device is full.
        """
        try:
            if config not in self._tickers:
                rotated = self._rotated  # made by launches like any other
                self._tickers[config] = self._forced(config, lambda: self._ticker(rotated))
            # A graph that is replayed asks for nothing.
            with tuned.forcing(self._tunable.op, config):
                return self._tickers[config].sample()
        except torch.OutOfMemoryError:
            raise NotTimedError("out of memory") from None

    def _ticker(self, rotated: Sequence[Operands]) -> Ticker:
        calls = [self._case.ours(operands) for operands in rotated]
        return self._clock.tickers({self._tunable.name: calls})[self._tunable.name]

    @functools.cached_property
    def _rotated(self) -> list[Operands]:
        first = self._case.operands(self._device, self._numel)
        return rotation_of(first, self._clock.cache_bytes)

    def _forced(self, config: LaunchConfig, work: Callable[[], T]) -> T:
        """Do `work` with the candidate; its launches must be of the tunable's case and default."""
        tunable = self._tunable
        with tuned.forcing(tunable.op, config) as forced:
            result = work()
        if forced.asked != {tunable.case: tunable.default}:
            raise RuntimeError(
                f"{tunable.name}: expected launches of that case, by default {tunable.default}, "
                f"got {forced.asked}; correct bench/tunables.py"
            )
        return result
