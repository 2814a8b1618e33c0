"""Owns the measurement of kernel cases: gate first, then ours, rivals and a copy in turn.

A case whose result is not its definition's, bit for bit, has no times. The copy moves the bytes of
the case, half of them read and half written, in the same rounds: a candidate's share of its rate is
the median of paired ratios, so what slows the machine slows both. All cases are gone over several
times, each with new memory, so that neither one moment nor one placement decides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from ..training.errors import UsageError
from .clocks import SAMPLE_S, Clock, Ticker, clock_of, num_rotated, rotation_of
from .kernel_cases.case import OURS, Bind, Case, Run
from .kernel_cases.rivals import quiet
from .reports import KIND, SCHEMA_VERSION, Report, Row, document
from .timing import alternating_order, pair_ratios

COPY = "copy"
COMPILED = "torch.compile"
# The definitions run on the CPU; what is larger is checked as far as this.
GATE_NUMEL = 256 * 1024
# Operands, the copy's, and what ours and rivals pack into, at most: times the bytes of a case.
_HELD = 5
# On a GPU the elements of a Llama 3 8B block, about.
_USUAL_NUMEL = {"cpu": 1024 * 1024, "cuda": 208 * 1024 * 1024}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long is measured: up to `passes` over all cases, as many as `limit_s` has room for, but
    one; in each at least `min_rounds` samples of a candidate, and up to `max_rounds` within
    `seconds` for each. compiled: torch.compile competes.
    """

    passes: int
    min_rounds: int
    max_rounds: int
    seconds: float
    limit_s: float = 600.0
    sample_s: float = SAMPLE_S
    compiled: bool = False


# The clock rate of a CPU that others use too drifts within minutes, and a copy does not show it:
# two runs of 3 passes within a minute differed by more than their spreads in 2 of 82 rows.
CPU_PACE = Pace(passes=8, min_rounds=2, max_rounds=10, seconds=0.07, limit_s=140.0)
# Compiling the kernels takes most of the time, and nothing drifts.
GPU_PACE = Pace(passes=1, min_rounds=5, max_rounds=25, seconds=0.1, compiled=True)


def pace_of(device: torch.device, *, compiled: bool | None = None) -> Pace:
    """The pace of a kind of device; by default torch.compile competes on GPUs."""
    pace = GPU_PACE if device.type == "cuda" else CPU_PACE
    return pace if compiled is None else replace(pace, compiled=compiled)


@dataclass
class _Job:
    """One case at one size, and what was seen of it so far."""

    case: Case
    numel: int
    rotated: int = 0
    cold: bool = False
    methods: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Rows, ours first in each case; cases with wrong results; what was left out and why."""

    rows: tuple[Row, ...]
    wrong: tuple[str, ...]
    notes: tuple[str, ...]


def default_numel(cases: Sequence[Case], device: torch.device) -> int:
    """The usual size of such a device, or half of it as often as it takes to fit."""
    clock, numel = clock_of(device), _USUAL_NUMEL[device.type]
    while numel > 1 and any(_memory(case, numel, clock) > clock.memory_bytes for case in cases):
        numel //= 2
    return numel


def require_memory(cases: Sequence[Case], numels: Sequence[int], device: torch.device) -> None:
    """Refuse sizes that cannot fit.

    Raises:
        UsageError: the operands, rotated, with what the candidates hold besides are too many bytes.
    """
    clock = clock_of(device)
    for case in cases:
        for numel in numels:
            needed = _memory(case, numel, clock)
            if needed > clock.memory_bytes:
                raise UsageError(
                    f"--numel: expected sizes that fit into {clock.memory_bytes >> 20} MiB, got "
                    f"{numel} elements, which take {needed >> 20} MiB for {case.name}; take less"
                )


def _memory(case: Case, numel: int, clock: Clock) -> int:
    num_bytes = case.num_bytes(numel)
    # Where bytes move twice there are up to twice as many rotated, but less than half of them held.
    return _HELD * num_bytes * num_rotated(num_bytes, clock.cache_bytes)


def measure(
    cases: Sequence[Case],
    numels: Sequence[int],
    device: torch.device,
    pace: Pace,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Every case at every size that it has; `tell` hears what is measured next."""
    clock = clock_of(device, sample_s=pace.sample_s)
    jobs = _jobs(cases, numels)
    notes: dict[str, None] = {}
    right, wrong = [], []
    for index, job in enumerate(jobs):
        tell(f"checking {index + 1} of {len(jobs)}: {job.case.name}")
        try:
            fault = _fault(job, device)
        except torch.OutOfMemoryError:
            notes[_unfit(job)] = None
            continue
        if fault is None:
            right.append(job)
        else:
            wrong.append(f"{job.case.name}, {job.case.numel(job.numel)} elements: {fault}")
    for number in _passes(pace):
        for index, job in enumerate(right):
            tell(f"timing, pass {number}, {index + 1} of {len(right)}: {job.case.name}")
            try:
                _sample(job, device, clock, pace, notes)
            except torch.OutOfMemoryError:
                notes[_unfit(job)] = None
    rows = tuple(row for job in right if job.samples for row in _rows(job))
    return Measured(rows, tuple(wrong), tuple(notes))


def _jobs(cases: Sequence[Case], numels: Sequence[int]) -> list[_Job]:
    """Each case once at each size it gets: for a matrix, several that are asked for may be one."""
    found: list[_Job] = []
    for case in cases:
        sizes: dict[int, _Job] = {}
        for numel in numels:
            sizes.setdefault(case.numel(numel), _Job(case, numel))
        found += sizes.values()
    return found


def _unfit(job: _Job) -> str:
    return f"{job.case.name}: {job.numel} elements do not fit, take less"


def _passes(pace: Pace) -> Iterator[int]:
    """1, 2, ... while another pass, as long as the last one, ends in time."""
    start = began = time.monotonic()
    for number in range(1, pace.passes + 1):
        yield number
        now = time.monotonic()
        if now - start + now - began > pace.limit_s:
            return
        began = now


def _fault(job: _Job, device: torch.device) -> str | None:
    """What is wrong with the results, if anything is."""
    try:
        agrees = job.case.agrees(device, min(job.numel, GATE_NUMEL))
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run is as wrong as any
        return f"{type(error).__name__}: {error}"
    return None if agrees else "not the bits of its definition"


def _sample(
    job: _Job, device: torch.device, clock: Clock, pace: Pace, notes: dict[str, None]
) -> None:
    """One pass over one case."""
    case = job.case
    num_bytes = case.num_bytes(job.numel)
    first = case.operands(device, job.numel)
    rotation = rotation_of(first, clock.cache_bytes)
    job.rotated = len(rotation)
    job.cold = job.rotated * first.footprint_bytes > clock.cache_bytes
    runs: dict[str, list[Run]] = {COPY: _copies(num_bytes, device, job.rotated)}
    for name, bind in _candidates(case, pace).items():
        try:
            with quiet():
                calls = [bind(operands) for operands in rotation]
                calls[0]()
        except Exception as error:
            # A rival may fail in any way.
            if name == OURS:
                raise
            notes[_note(name, case.name, error)] = None
        else:
            runs[name] = calls
    tickers = clock.tickers(runs, uncaptured=case.uncaptured)
    job.methods = {name: ticker.method for name, ticker in tickers.items()}
    for name, times in _in_turn(tickers, pace).items():
        job.samples.setdefault(name, []).extend(times)


def _note(name: str, case: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, ImportError):  # of all cases alike
        return f"{name} is left out: {reason}"
    return f"{name} is left out of {case}: {type(error).__name__}: {reason}"


def _candidates(case: Case, pace: Pace) -> dict[str, Bind]:
    found = case.candidates
    if pace.compiled and case.plain is not None:
        found[COMPILED] = _compiled(case.plain)
    return found


def _compiled(plain: Bind) -> Bind:
    # Compiled code is found again by the source it was made from, which cases share: after a few
    # sizes and dtypes of the same source torch would run it uncompiled.
    torch.compiler.reset()
    return lambda operands: torch.compile(plain(operands), dynamic=False)


def _copies(num_bytes: int, device: torch.device, count: int) -> list[Run]:
    """Copies that move `num_bytes` each, in as many places."""

    def one() -> Run:
        source = torch.ones(max(1, num_bytes // 8), device=device)
        target = source.clone()
        return lambda: target.copy_(source)

    return [one() for _ in range(count)]


def _in_turn(tickers: dict[str, Ticker], pace: Pace) -> dict[str, list[float]]:
    """Samples of every candidate, taken in turn: as many of each."""
    names = list(tickers)
    start = time.perf_counter()
    times = {name: [tickers[name].sample()] for name in names}
    round_s = time.perf_counter() - start
    rounds = int(pace.seconds * len(names) / max(round_s, 1e-9))
    more = max(pace.min_rounds, min(pace.max_rounds, rounds)) - 1
    # The first round went forwards.
    for name in alternating_order(names[::-1], more) if more else ():
        times[name].append(tickers[name].sample())
    return times


def _rows(job: _Job) -> list[Row]:
    case, num_bytes = job.case, job.case.num_bytes(job.numel)
    copies = job.samples[COPY]
    copy_rate = num_bytes / statistics.median(copies)
    rows = []
    for name, times in job.samples.items():
        if name == COPY or len(times) != len(copies):
            continue
        median, low, high = spread(times)
        ours = name == OURS and case.target is not None
        rows.append(
            Row(
                case=case.name,
                op=case.op,
                format=case.format,
                dtype=case.dtype,
                world=case.world,
                numel=case.numel(job.numel),
                num_bytes=num_bytes,
                candidate=name,
                median_us=median * 1e6,
                low_us=low * 1e6,
                high_us=high * 1e6,
                num_samples=len(times),
                gb_per_s=num_bytes / median / 1e9,
                copy_gb_per_s=copy_rate / 1e9,
                percent_of_copy=100.0 * statistics.median(pair_ratios(copies, times)),
                target_percent=100.0 * case.target if ours and case.target else None,
                method=job.methods[name],
                rotated=job.rotated,
                cold=job.cold,
            )
        )
    return rows


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10 % and 90 % quantile."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    tail = round(0.1 * last)
    return statistics.median(ordered), ordered[tail], ordered[last - tail]


def report_of(measured: Measured, device: torch.device, pace: Pace, command: str) -> Report:
    """All that was found, of this machine and now."""
    head = document(KIND, (), device, schema_version=SCHEMA_VERSION) | {"command": command}
    return Report(
        **head,
        settings=asdict(pace),
        rows=measured.rows,
        wrong=measured.wrong,
        notes=measured.notes,
    )
