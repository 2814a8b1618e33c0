"""The measurement of kernel cases: gate first, then ours, rivals and a copy in turn.

A case whose result is not its definition's, bit for bit, has no times: all of a small one, and the
head, the middle and the tail of the one that is timed, before it is and of what the timed calls
leave in every pass. The copy moves the bytes of the case, half of them read and half written, in
the same rounds, by the fastest way there is: a candidate's share of its rate is the median of
paired ratios, so what slows the machine slows both. Ratios are of times taken alike: where a rival
cannot be part of a CUDA graph, ours and the copy are timed by launches as well. All cases are gone
over several times, each with new memory, so that neither one moment nor one placement decides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from ..kernels.ahead.counted import target_share
from ..kernels.ahead.machines import Gpu, gpu_of
from ..kernels.case import Case, Operands
from ..training.errors import UsageError
from .bandwidth import BASELINES, copies, reads
from .clocks import SAMPLE_S, Clock, Ticker, clock_of, num_rotated, rotation_of
from .kernel_cases import parts
from .kernel_cases.candidates import candidates_of
from .kernel_cases.competitors import OURS, Bind, Run
from .kernel_cases.packages import quiet
from .kernel_cases.rivals import UNCAPTURED
from .reports import EVENTS_METHOD, GRAPH_METHOD, KIND, SCHEMA_VERSION, Report, Row, document
from .timing import alternating_order, pair_ratios

LAUNCHED = ", launched"
"""Behind the name of what is timed by launches too, beside what no graph may hold."""
# The definitions run on the CPU; what is larger is looked at in parts.
GATE_NUMEL = 256 * 1024
# Operands, the copy's, and what ours and rivals pack into, at most: times the bytes of a case.
_HELD = 5
_OVERWRITTEN = 0xA5
# On a GPU the elements of a Llama 3 8B block, about.
_USUAL_NUMEL = {"cpu": 1024 * 1024, "cuda": 208 * 1024 * 1024}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long is measured: up to `passes` over all cases, as many as `limit_s` has room for, but
    one; in each at least `min_rounds` samples of a candidate, and up to `max_rounds` within
    `seconds` for each. compiled: torch.compile competes, alone and as rivals' users have it.
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

    @property
    def name(self) -> str:
        """For a person."""
        return self.case.full_name

    def baseline_of(self, name: str) -> str:
        """The fastest of what only moves bytes and is timed as `name` is."""
        alike = [
            other
            for other, times in self.samples.items()
            if other.removesuffix(LAUNCHED) in BASELINES
            and self.methods[other] == self.methods[name]
            and len(times) == len(self.samples[name])
        ]
        return min(alike, key=lambda other: statistics.median(self.samples[other]))


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
                    f"{numel} elements, which take {needed >> 20} MiB for {case.full_name}; take "
                    "less"
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
    wrong: list[str] = []

    def is_right(job: _Job, look: Callable[[_Job], str | None]) -> bool:
        """Whether there is room to look, and nothing wrong to see."""
        try:
            fault = look(job)
        except torch.OutOfMemoryError:  # says nothing of the kernel
            notes[f"{job.name}: {job.numel} elements do not fit, take less"] = None
            return False
        except Exception as error:  # noqa: BLE001 - a kernel that cannot run is as wrong as any
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            job.samples.clear()
            wrong.append(f"{job.name}, {job.case.numel(job.numel)} elements: {fault}")
        return fault is None

    right = []
    for index, job in enumerate(jobs):
        tell(f"checking {index + 1} of {len(jobs)}: {job.name}")
        if is_right(job, lambda job: _disagreement(job, device)):
            right.append(job)
    for number in _passes(pace):
        for index, job in enumerate(list(right)):
            tell(f"timing, pass {number}, {index + 1} of {len(right)}: {job.name}")
            if not is_right(job, lambda job: _sample(job, device, clock, pace, notes)):
                right.remove(job)
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    rows = tuple(row for job in jobs if job.samples for row in _rows(job, gpu))
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


def _passes(pace: Pace) -> Iterator[int]:
    """1, 2, ... while another pass, as long as the last one, ends in time."""
    start = began = time.monotonic()
    for number in range(1, pace.passes + 1):
        yield number
        now = time.monotonic()
        if now - start + now - began > pace.limit_s:
            return
        began = now


def _disagreement(job: _Job, device: torch.device) -> str | None:
    """What is wrong at a size of which all can be looked at."""
    agrees = job.case.agrees(device, min(job.numel, GATE_NUMEL))
    return None if agrees else "not the bits of its definition"


@dataclass
class _Kept:
    """A call that keeps what it returned last: where a graph holds it, replays write there too."""

    run: Run
    returned: object = None

    def __call__(self) -> None:
        self.returned = self.run()


def _sample(
    job: _Job, device: torch.device, clock: Clock, pace: Pace, notes: dict[str, None]
) -> str | None:
    """One pass over one case; what is wrong with its result, if anything is."""
    case = job.case
    first = case.operands(device, job.numel)
    in_parts = case.numel(job.numel) > GATE_NUMEL
    if in_parts and not job.samples and (fault := parts.fault(case, first)):
        return fault
    rotation = rotation_of(first, clock.cache_bytes)
    job.rotated = len(rotation)
    job.cold = job.rotated * first.footprint_bytes > clock.cache_bytes
    moving = reads if case.op in parts.ONLY_READ else copies
    runs = dict(moving(case.num_bytes(job.numel), device, job.rotated))
    runs |= _bound(candidates_of(case, compiled=pace.compiled), rotation, job, notes)
    kept = _Kept(runs[OURS][0])
    tickers = clock.tickers(runs | {OURS: [kept, *runs[OURS][1:]]}, uncaptured=UNCAPTURED)
    methods = {name: ticker.method for name, ticker in tickers.items()}
    if EVENTS_METHOD in methods.values():
        again = {
            name + LAUNCHED: runs[name]
            for name, method in methods.items()
            if method == GRAPH_METHOD and name in (*BASELINES, OURS)
        }
        tickers |= clock.tickers(again, uncaptured=again)
    job.methods = {name: ticker.method for name, ticker in tickers.items()}
    for name, times in _in_turn(tickers, pace).items():
        job.samples.setdefault(name, []).extend(times)
    return _fault_of_timed(case, first, kept, tickers[OURS], len(rotation)) if in_parts else None


def _fault_of_timed(
    case: Case, first: Operands, kept: _Kept, ticker: Ticker, num_rotated: int
) -> str | None:
    """What is wrong with what the timed calls leave in the first operands, if anything is.

    Rivals write there too: so all is overwritten, and calls are made as they were for the clock,
    as many samples as it takes until they come to these operands. What updates is called so nobody
    knows how many times: of that one more call is looked at, on what the timed ones have left.
    """

    def timed() -> Sequence[torch.Tensor]:
        for tensor in first.results(kept.returned):
            if any(tensor is one for one in first.scalars):
                continue  # may be a record that a call only raises
            tensor.view(-1).view(torch.uint8).fill_(_OVERWRITTEN)
        for _ in range(num_rotated):
            ticker.sample()
        return first.results(kept.returned)

    return parts.fault(case, first, None if first.updated else timed)


def _bound(
    candidates: Mapping[str, Bind], rotation: Sequence[Operands], job: _Job, notes: dict[str, None]
) -> dict[str, Sequence[Run]]:
    """The candidates' calls on all operands, of those that can make them."""
    found: dict[str, Sequence[Run]] = {}
    for name, bind in candidates.items():
        try:
            with quiet():
                calls = [bind(operands) for operands in rotation]
                calls[0]()
        except Exception as error:
            # A rival may fail in any way.
            if name == OURS:
                raise
            notes[_note(name, job.name, error)] = None
        else:
            found[name] = calls
    return found


def _note(name: str, case: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    if isinstance(error, ImportError):  # of all cases alike
        return f"{name} is left out: {reason}"
    return f"{name} is left out of {case}: {type(error).__name__}: {reason}"


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


def _rows(job: _Job, gpu: Gpu | None) -> list[Row]:
    case, num_bytes = job.case, job.case.num_bytes(job.numel)
    num_samples = len(job.samples[OURS])
    rows = []
    for name, times in job.samples.items():
        if name.removesuffix(LAUNCHED) in BASELINES or len(times) != num_samples:
            continue
        baseline = job.baseline_of(name)
        copied = job.samples[baseline]
        median, low, high = spread(times)
        target = target_share(case, gpu) if name == OURS else None
        rows.append(
            Row(
                case=job.name,
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
                copy_gb_per_s=num_bytes / statistics.median(copied) / 1e9,
                percent_of_copy=100.0 * statistics.median(pair_ratios(copied, times)),
                target_percent=None if target is None else 100.0 * target,
                method=job.methods[name],
                rotated=job.rotated,
                cold=job.cold,
                baseline=baseline.removesuffix(LAUNCHED),
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
