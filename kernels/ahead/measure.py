"""Measures what the compiler makes of cases: many of them by many processes, each only once.

Processes, since Python's parser, by which Triton reads kernels, fails when two threads use it at
once (Python 3.11). What was measured is kept in sidestream/measured of $XDG_CACHE_HOME, or of
~/.cache, a small file for each: under a hash of all that it follows from, so that no file is ever
wrong, and one that is damaged is measured anew.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from ..case import Case, Gate
from ..cases import by_name, case_of
from ..launch import Launch, LaunchConfig
from .compile import TARGETS, CompiledKernel, compile_launch, specialised
from .count import WIDE_BITS, CountError
from .count import Path as CodePath

# Below this a process costs more, for its imports, than it saves.
MIN_CASES_A_PROCESS = 4
_AMD_WAVES = re.compile(r"; Occupancy: (\d+)")

T = TypeVar("T", bound=Hashable)
Found = TypeVar("Found")
Task = tuple[str, str, str]
"""Op, case and target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the compiler made of one case for one target; None is what cannot be said.

    registers, spill_bytes, shared_bytes: the most of all its launches. num_warps, waves (AMD's,
    resident on a SIMD), `*_bits` (the widths of accesses, widest first), wide_bytes (of a thread's
    element, by 16 bytes at once), instructions and integers (of an element, and those of them that
    the pipe of integers takes): of the launch that is counted, on the path of full tiles where that
    can be told apart.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    waves: int | None
    load_bits: tuple[int, ...]
    store_bits: tuple[int, ...]
    wide_bytes: float | None
    instructions: float | None
    integers: float | None

    def faults(self, gate: Gate) -> list[str]:
        """What exceeds the gate, a sentence each."""
        return faults(
            gate,
            instructions=self.instructions,
            registers=self.registers,
            spill_bytes=self.spill_bytes,
        )


def faults(
    gate: Gate | None, *, instructions: float | None, registers: int, spill_bytes: int
) -> list[str]:
    """What exceeds the gate, a sentence each; without one nothing may spill."""
    found = []
    for what, value, limit in (
        ("instructions an element", instructions, None if gate is None else gate.instructions),
        ("registers", registers, None if gate is None else gate.registers),
        ("bytes spilled", spill_bytes, 0),
    ):
        if limit is not None and value is None:
            found.append(f"{what}: expected a count, got none")
        elif limit is not None and value is not None and value > limit:
            found.append(f"{what}: expected at most {limit:g}, got {value:.4g}")
    return found


def measure(case: Case, target: str, config: LaunchConfig | None = None) -> Measured:
    """Compile and look, unless that has been done; `config`: how all is launched, by default as the
    launchers do. An error is told with the case's name.
    """
    plan = _plan(case, target, config)
    if (kept := _read(plan.key)) is not None:
        return kept
    try:
        compiled = [compile_launch(launch, target) for launch in plan.launches]
    except Exception as error:
        error.add_note(f"while compiling {case.full_name} for {target}")
        raise
    found = _look(case, compiled, plan)
    _write(plan.key, found)
    return found


def measure_all(
    tasks: Sequence[Task], num_processes: int, on_measured: Callable[[Task, Measured], None]
) -> tuple[Measured, ...]:
    """In the order of the tasks; `on_measured` is told of each as it is made."""
    named = by_name()
    found: dict[Task, Measured] = {}

    def add(task: Task, measured: Measured) -> None:
        found[task] = measured
        on_measured(task, measured)

    for task in tasks:
        if (kept := _read(_plan(named[task[:2]], task[2]).key)) is not None:
            add(task, kept)
    left = [task for task in tasks if task not in found]
    for task, measured in by_processes(_measured, left, num_processes):
        add(task, measured)
    return tuple(found[task] for task in tasks)


def by_processes(
    work: Callable[[T], Found], tasks: Iterable[T], num_processes: int
) -> Iterator[tuple[T, Found]]:
    """Each task once, with what `work` makes of it, as it is made; in this process where there are
    few tasks. What has not begun when the iteration ends is left out.
    """
    left = list(dict.fromkeys(tasks))
    num_processes = min(num_processes, len(left) // MIN_CASES_A_PROCESS)
    if num_processes <= 1:
        yield from ((task, work(task)) for task in left)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        futures = {pool.submit(work, task): task for task in left}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _measured(task: Task) -> Measured:
    op, name, target = task
    return measure(case_of(op, name), target)


def _look(case: Case, compiled: Sequence[CompiledKernel], plan: _Plan) -> Measured:
    counted, per_thread = compiled[case.counted], plan.elements_per_thread
    path = _path(case, counted, per_thread)
    accesses = [step.access for step in counted.instructions if step.access is not None]
    if path is not None:
        accesses = list(path.accesses)
    is_nvidia = TARGETS[counted.target].backend == "cuda"
    waves = None if is_nvidia else _AMD_WAVES.search(counted.assembly)
    return Measured(
        registers=max(one.registers for one in compiled),
        spill_bytes=max(one.spill_bytes for one in compiled),
        shared_bytes=max(one.shared_bytes for one in compiled),
        num_warps=plan.launches[case.counted].num_warps,
        waves=int(waves[1]) if waves else None,
        load_bits=_widths(access.bits for access in accesses if access.is_load),
        store_bits=_widths(access.bits for access in accesses if not access.is_load),
        wide_bytes=None
        if path is None
        else sum(access.bits for access in accesses if access.bits >= WIDE_BITS) / 8 / per_thread,
        instructions=path.instructions / per_thread if path is not None and is_nvidia else None,
        integers=path.integers / per_thread if path is not None and is_nvidia else None,
    )


def _path(case: Case, compiled: CompiledKernel, per_thread: float) -> CodePath | None:
    if case.count is None:
        return None
    with contextlib.suppress(CountError):
        return case.count(compiled.instructions, per_thread * case.moved_bytes)
    return None


def _widths(bits: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(bits), reverse=True))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be compiled, and the key of all that a measurement follows from."""

    launches: tuple[Launch, ...]
    elements_per_thread: float
    key: str


def _plan(case: Case, target: str, config: LaunchConfig | None = None) -> _Plan:
    launches = case.launches(config=config)
    per_thread = case.elements_per_thread(launches[case.counted])
    parts: list[object] = [
        *(triton.__version__, target, _own_source()),
        *(case.counted, getattr(case.count, "__name__", None), case.moved_bytes, per_thread),
        sorted(get_cache_invalidating_env_vars().items()),
    ]
    for launch in launches:
        signature, constants = specialised(launch, target)
        kernel = launch.kernel.cache_key
        parts.append([kernel, signature, sorted(constants.items()), launch.num_warps])
    return _Plan(launches, per_thread, hashlib.sha256(repr(parts).encode()).hexdigest())


@functools.cache
def _own_source() -> str:
    """What is written depends on the code that compiles and counts, too."""
    folder = Path(__file__).parent
    return "".join((folder / f"{name}.py").read_text() for name in ("compile", "count", "measure"))


def _file(key: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sidestream" / "measured" / f"{key}.json"


def _read(key: str) -> Measured | None:
    """What lies under `key`; None where nothing does that can be used."""
    try:
        content: dict[str, Any] = json.loads(_file(key).read_bytes())
        values = {field.name: content[field.name] for field in dataclasses.fields(Measured)}
        for name in ("load_bits", "store_bits"):
            values[name] = tuple(map(int, values[name]))
        numbers = [value for value in values.values() if not isinstance(value, tuple)]
        if not all(isinstance(number, int | float | None) for number in numbers):
            return None
        return Measured(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(key: str, measured: Measured) -> None:
    """Put it there at once, so that no process reads a part; a disk that is full is no error."""
    path = _file(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump(dataclasses.asdict(measured), file)
                file.close()  # only now may the disk turn out to be full
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
