"""The profile of repeated calls: which Python functions the time goes to, in microseconds of one
unit of work.

cProfile sees the calling thread only and makes Python calls look dearer than they are: read shares
and counts, not sums. CPU time of other threads, where a trainer's lanes work, is given beside it.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FunctionCost:
    """One function: own time, time with everything it called, and number of calls, each for one
    unit of work.
    """

    name: str
    own_us: float
    total_us: float
    calls: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where `this_thread_us` went; `other_threads_us` is CPU time that cProfile could not look
    into.
    """

    functions: tuple[FunctionCost, ...]
    this_thread_us: float
    other_threads_us: float

    def describe(self, *, top: int = 40) -> str:
        """Two tables of the `top` functions: by own time, and by time with callees."""
        heading = (
            f"{self.this_thread_us:.0f} us in this thread (slowed by the profiler), "
            f"{self.other_threads_us:.0f} us CPU in other threads"
        )
        by_own = sorted(self.functions, key=lambda cost: cost.own_us, reverse=True)
        by_total = sorted(self.functions, key=lambda cost: cost.total_us, reverse=True)
        return "\n\n".join(
            [
                heading,
                _table("by own time", by_own[:top]),
                _table("with callees", by_total[:top]),
            ]
        )


def profile_calls(call: Callable[[], object], repeats: int, *, units: int = 1) -> Profile:
    """Profile `repeats` calls; every figure is divided by `repeats * units`."""
    profiler = cProfile.Profile()

    def run() -> None:
        profiler.enable()
        for _ in range(repeats):
            call()
        profiler.disable()

    own, others = cpu_seconds(run)
    share = 1.0 / (repeats * units)
    functions = tuple(
        FunctionCost(
            name=_function_name(entry.code),
            own_us=entry.inlinetime * 1e6 * share,
            total_us=entry.totaltime * 1e6 * share,
            calls=entry.callcount * share,
        )
        for entry in profiler.getstats()
    )
    return Profile(functions, own * 1e6 * share, others * 1e6 * share)


def cpu_seconds(run: Callable[[], None]) -> tuple[float, float]:
    """CPU time of `run` in this thread, and meanwhile in all others of the process."""
    process, thread = time.process_time(), time.thread_time()
    run()
    own = time.thread_time() - thread
    return own, max(0.0, time.process_time() - process - own)


def _function_name(code: object) -> str:
    if isinstance(code, str):
        return code
    path = Path(code.co_filename)  # type: ignore[attr-defined]
    return f"{path.parent.name}/{path.name}:{code.co_firstlineno} {code.co_name}"  # type: ignore[attr-defined]


def _table(title: str, costs: list[FunctionCost]) -> str:
    lines = [f"{'own us':>9} {'total us':>9} {'calls':>7}  {title}"]
    lines += [
        f"{cost.own_us:9.1f} {cost.total_us:9.1f} {cost.calls:7.2f}  {cost.name}" for cost in costs
    ]
    return "\n".join(lines)
