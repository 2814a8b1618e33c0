"""Trainings that differ in their wires alone: which are to be done, and what has come of them.

    results.jsonl    a line for every run that is done, written as soon as it is
    same run         same settings (by their digest), wire and what it stands for, seed, attempt

So whatever ends the command, only the runs under way are lost, and the next call does the rest. The
baseline's first run is done twice: equal bits show that the wire alone makes a difference.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .convergence_wires import BASELINE, WIRES
from .convergence_worker import FINAL_STEPS, Outcome, Run, Settings, train
from .ranks import run_ranks
from .reports import ReportError, write_text

RESULTS_NAME = "results.jsonl"
_DIGITS = 5  # of a loss
_START_S, _STEP_S = 300.0, 2.0  # beyond any machine that this is of use on


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run that is done, as a line of the file. Losses are nats per byte, rounded; None where they
    were not finite, with which a run ends early. Bytes: see `Outcome`.

    validation: [step, loss] pairs. final_validation_loss: mean of those of the last 100 steps;
    None where the run did not come so far.
    """

    wire: str
    seed: int
    attempt: int
    settings_digest: str
    settings: dict[str, Any]
    wire_settings: dict[str, str]
    num_parameters: int
    unigram_loss: float
    final_validation_loss: float | None
    grad_bytes: float | None
    weight_bytes: float | None
    seconds: float
    weights_sha256: str
    date: str
    command: str
    machine: dict[str, Any]
    validation: list[list[Any]]
    losses: list[float | None]

    @property
    def run(self) -> Run:
        """Which one."""
        return Run(self.seed, self.attempt, self.wire)

    def line(self) -> str:
        """Of the file; floats as short as they are exact."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is noted with each result, beside what came of it."""

    unigram_loss: float
    date: str
    command: str
    machine: dict[str, Any]


def digest_of(settings: Settings) -> str:
    """Equal for settings whose results may be compared."""
    text = json.dumps(settings.described(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def runs_of(wires: Iterable[str], seeds: int) -> list[Run]:
    """Every wire with every seed, the baseline too where it is not named, and once again with the
    first seed; seed by seed, so that what is done soon says something of all wires.
    """
    names = dict.fromkeys((BASELINE, *wires))
    runs = [Run(seed, 0, wire) for seed in range(seeds) for wire in names]
    return [runs[0], Run(0, 1, BASELINE), *runs[1:]]


def missing(runs: Iterable[Run], results: Iterable[Result], settings: Settings) -> list[Run]:
    """Those of `runs` that no result of the same settings is of."""
    digest = digest_of(settings)
    done = {
        result.run
        for result in results
        if result.settings_digest == digest
        and result.wire_settings == WIRES[result.wire].described()
    }
    return [run for run in runs if run not in done]


def comparable(results: Iterable[Result], digest: str) -> list[Result]:
    """Those with these settings; of each run the last, should its wire have meant something else
    before.
    """
    return list({one.run: one for one in results if one.settings_digest == digest}.values())


def result_of(run: Run, settings: Settings, outcome: Outcome, beside: Circumstances) -> Result:
    """The line of a run that is done."""
    final = [
        loss for step, loss in outcome.validation.items() if step > settings.steps - FINAL_STEPS
    ]
    is_whole = settings.steps in outcome.validation
    return Result(
        wire=run.wire,
        seed=run.seed,
        attempt=run.attempt,
        settings_digest=digest_of(settings),
        settings=settings.described(),
        wire_settings=WIRES[run.wire].described(),
        num_parameters=outcome.num_parameters,
        final_validation_loss=_rounded(sum(final) / len(final)) if is_whole else None,
        grad_bytes=outcome.grad_bytes,
        weight_bytes=outcome.weight_bytes,
        seconds=round(outcome.seconds, 1),
        weights_sha256=outcome.weights_sha256,
        validation=[[step, _rounded(loss)] for step, loss in outcome.validation.items()],
        losses=[_rounded(loss) for loss in outcome.losses],
        **asdict(beside),
    )


def _rounded(loss: float) -> float | None:
    return round(loss, _DIGITS) if math.isfinite(loss) else None


def measure(
    runs: Sequence[Run], settings: Settings, jobs: int, on_done: Callable[[Run, Outcome], None]
) -> None:
    """Do `runs`, `jobs` at a time, each in ranks of its own; `on_done` is called as they end.

    Raises:
        RanksFailed: one of them did; the others are ended.
    """
    stop = threading.Event()
    limit_s = _START_S + _STEP_S * settings.steps

    def do(run: Run) -> Outcome:
        return run_ranks(train, settings.ranks, (settings, run), timeout_s=limit_s, stop=stop)[0]

    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = {pool.submit(do, run): run for run in runs}
            for future in as_completed(futures):
                on_done(futures[future], future.result())
        finally:
            # Whatever ends this, an interruption too: the pool's end waits for what runs.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def add_result(folder: Path, result: Result) -> None:
    """Write it to the file of results: all of its line or nothing.

    Raises:
        UsageError: the disk is full, or the like.
    """
    path = folder / RESULTS_NAME
    write_text(path, (path.read_text() if path.exists() else "") + result.line())


def read_results(folder: Path) -> list[Result]:
    """The results in `folder`, in the order in which they came; none where there is no file.

    Raises:
        ReportError: the file cannot be read, or a line of it is no result.
    """
    path = folder / RESULTS_NAME
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: expected results, got {error}; give another folder") from error
    return [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _read(line: str, where: str) -> Result:
    try:
        result = Result(**json.loads(line))
        if result.wire not in WIRES:
            raise ValueError(f"an unknown wire, {result.wire!r}")
        return result
    except (TypeError, ValueError) as error:
        raise ReportError(
            f"{where}: expected a result of this version, got {str(error)!r:.200}; take the line "
            "out, or give another folder"
        ) from error
