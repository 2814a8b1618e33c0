"""The search for the fastest of some candidates, with a clock that is noisy; pure.

    prune    what the compiler says rules a candidate out, at no run
    gate     a candidate whose result is wrong is never timed
    rounds   all that are left, once a round, each round in the reverse order of the one before
    choice   among those within 1 % of the best the default, else the smallest block

A candidate's score is the median of its ratios to the default in the same rounds, so that what
slows the machine for a while slows both. The default is first, is never pruned, and is in every
round. Half of the budget may be spent on the gate; what it does not get to is not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..kernels import LaunchConfig
from .timing import pair_ratios

MIN_ROUNDS, MAX_ROUNDS = 8, 40
TIE = 1.01

TIMED, NO_TIME = "timed", "no time"


class NotTimedError(Exception):
    """Raised by a clock that cannot time a candidate, which is then ruled out; says why."""


@dataclass
class Trial:
    """What became of one candidate: timed, no time, or why it was ruled out.

    samples: seconds. score: the median of the ratios to the default; below 1 is faster.
    """

    config: LaunchConfig
    fate: str = TIMED
    samples: list[float] = field(default_factory=list)
    score: float | None = None


@dataclass(frozen=True)
class Sweep:
    """All trials, the default's first. chosen: None where the default's result is wrong."""

    trials: tuple[Trial, ...]
    chosen: LaunchConfig | None

    @property
    def gain(self) -> float | None:
        """The part of the default's time that the chosen one saves."""
        scores = [one.score for one in self.trials if one.config == self.chosen]
        return 1.0 - scores[0] if scores and scores[0] is not None else None

    def median_of(self, config: LaunchConfig) -> float:
        """Seconds of a call, of a candidate that was timed."""
        return statistics.median(
            seconds for one in self.trials if one.config == config for seconds in one.samples
        )


Verdict = Callable[[LaunchConfig], str | None]
"""Why a candidate is ruled out; None where it is not."""


def sweep(
    candidates: Sequence[LaunchConfig],
    *,
    prune: Verdict,
    gate: Verdict,
    sample: Callable[[LaunchConfig], float],
    budget_s: float,
    now: Callable[[], float],
) -> Sweep:
    """Find the fastest candidate; the first one is the default.

    `sample` may raise `NotTimedError`; where it does of the default, nothing is timed any more.
    Ends within `budget_s` but for the step it is in, and the first `MIN_ROUNDS` rounds.
    """
    start = now()
    trials = [Trial(config) for config in candidates]
    for trial in trials[1:]:
        trial.fate = prune(trial.config) or trial.fate
    _gate(trials, gate, now, start + budget_s / 2)
    if trials[0].fate != TIMED:
        return Sweep(tuple(trials), None)
    left = [one for one in trials if one.fate == TIMED]
    if len(left) > 1:
        _time(left, sample, now, start + budget_s)
    return Sweep(tuple(trials), _choice(trials))


def _gate(
    trials: Sequence[Trial], gate: Verdict, now: Callable[[], float], deadline: float
) -> None:
    """The default is looked at however short the time."""
    for index, trial in enumerate(one for one in trials if one.fate == TIMED):
        if index and now() >= deadline:
            trial.fate = NO_TIME
        elif reason := gate(trial.config):
            trial.fate = reason


def _time(
    trials: list[Trial],
    sample: Callable[[LaunchConfig], float],
    now: Callable[[], float],
    deadline: float,
) -> None:
    default = trials[0]
    for number in range(MAX_ROUNDS):
        for trial in trials[::-1] if number % 2 else trials:
            try:
                trial.samples.append(sample(trial.config))
            except NotTimedError as error:
                trial.fate = str(error)
        trials = [one for one in trials if one.fate == TIMED]
        if default.fate != TIMED or len(trials) == 1:
            return
        for trial in trials:
            trial.score = statistics.median(pair_ratios(trial.samples, default.samples))
        if number + 1 >= MIN_ROUNDS and now() >= deadline:
            return


def size_of(config: LaunchConfig) -> tuple[int, int]:
    """What candidates are ordered by."""
    return config.block_bytes, config.num_warps


def _choice(trials: Sequence[Trial]) -> LaunchConfig:
    scores = {
        one.config: one.score for one in trials if one.fate == TIMED and one.score is not None
    }
    default = trials[0].config
    best = min(scores.values(), default=1.0)
    tied = [config for config, score in scores.items() if score <= best * TIE]
    return default if default in tied or not tied else min(tied, key=size_of)
