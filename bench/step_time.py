"""Two trainers' step times compared: within which limit, and what the launches of it say together.

A launch starts fresh ranks that hold both trainers; their steps alternate A B B A, and a pair's
ratio is candidate over rival. Losses and weights must agree. Memory cannot be told apart there, so
every trainer has one more launch to itself.

Limits are those of the project for several gloo ranks; a GPU has none yet. Memory is the peak of a
rank above what its process held before the trainer was built; on a CPU freed memory is returned at
once there (see `resident`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .ranks import run_ranks
from .step_worker import (
    PairCase,
    PairOutcome,
    SoloCase,
    SoloOutcome,
    Task,
    work_alone,
    work_on_pair,
)
from .timing import (
    RESOLUTION,
    Estimate,
    compare_with_limit,
    estimate_median,
    estimate_median_of_launches,
    pair_ratios,
)

LIMITS = {
    ("zero0", "ddp"): 1.00,
    ("buckets", "ddp"): 1.00,
    ("zero1", "ddp_zero1"): 0.95,
    ("zero3", "fsdp2"): 0.85,
    ("zero3", "fsdp2_tuned"): 0.95,
}
NO_MORE_MEMORY = (("zero3", "fsdp2_tuned"),)
MEMORY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How all comparisons of a run are made."""

    task: Task
    world: int
    pairs: int
    launches: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One trainer in one launch: per pair the slowest rank's seconds, a step's bytes of all ranks
    together, and the mean loss of the ranks in the last step.
    """

    seconds: list[float]
    wire_bytes: int | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of one comparison. `steps`: that each trainer took; the rest is how far their
    weights are apart after these.
    """

    candidate: Seen
    rival: Seen
    steps: int
    relative_difference: float
    share_of_unequal_elements: float

    @property
    def ratios(self) -> list[float]:
        """Candidate over rival, pair by pair."""
        return pair_ratios(self.candidate.seconds, self.rival.seconds)

    def describe(self) -> str:
        """Medians and the ratio with its interval."""
        seen = (self.candidate, self.rival)
        medians = " / ".join(f"{statistics.median(each.seconds) * 1e3:.1f}" for each in seen)
        return f"{medians} ms, ratio {estimate_median(self.ratios).describe()}"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one trainer of a comparison needed. `wire_bytes`: a step, all ranks together."""

    ms: float
    tokens_per_s: float
    peak_mib: float
    wire_bytes: int | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `limit`: of the ratio, None where the project has set none."""

    candidate: str
    rival: str
    candidate_figures: Figures
    rival_figures: Figures
    ratio: Estimate
    limit: float | None
    steps: int
    relative_difference: float
    share_of_unequal_elements: float
    launches: list[Launch]

    def verdicts(self) -> list[str]:
        """What is to be said of the ratio and, where it is limited too, of the memory."""
        names = f"{self.candidate} / {self.rival}"
        lines = []
        if self.limit is not None:
            verdict = compare_with_limit(self.ratio, self.limit)
            lines.append(f"{names}: time at most {self.limit:.2f}: {verdict}")
            if (self.candidate, self.rival) in NO_MORE_MEMORY:
                ours, theirs = self.candidate_figures.peak_mib, self.rival_figures.peak_mib
                verdict = "met" if ours <= theirs else "missed"
                lines.append(f"{names}: no more memory: {verdict} ({ours:.1f} / {theirs:.1f} MiB)")
        if abs(self.ratio.median - 1.0) < RESOLUTION:
            lines.append(
                f"{names}: closer to 1 than {RESOLUTION:.0%}, which this method does not tell apart"
            )
        return lines


def compare(
    comparisons: Sequence[tuple[str, str]], plan: Plan, tell: Callable[[str], None]
) -> list[Row]:
    """A row for each (candidate, rival); `tell` hears of every launch when it has ended.

    Raises RanksFailed when two trainers did not train alike, or a rank failed.
    """
    peaks: dict[str, float] = {}
    rows = []
    for names in comparisons:
        tell(f"{names[0]} against {names[1]}: {plan.launches} launches of {plan.pairs} pairs")
        launches = []
        for index in range(1, plan.launches + 1):
            launches.append(_launch_pair(names, plan))
            tell(f"  launch {index}: {launches[-1].describe()}")
        for name in names:
            if name not in peaks:
                peaks[name] = _launch_for_memory(name, plan)
                tell(f"  {name} alone: {peaks[name]:.1f} MiB")
        rows.append(summarise(names, plan, launches, peaks))
    return rows


def _launch_pair(names: tuple[str, str], plan: Plan) -> Launch:
    case = PairCase(names=names, pairs=plan.pairs, task=plan.task)
    outcomes: list[PairOutcome] = run_ranks(
        work_on_pair, plan.world, case, device_type=plan.task.device_type
    )
    candidate, rival = (
        Seen(
            seconds=[
                max(times) for times in zip(*(o.seconds[name] for o in outcomes), strict=True)
            ],
            wire_bytes=outcomes[0].wire_bytes[name],
            loss=statistics.fmean(outcome.losses[name][-1] for outcome in outcomes),
        )
        for name in names
    )
    return Launch(
        candidate=candidate,
        rival=rival,
        steps=len(outcomes[0].losses[names[0]]),
        relative_difference=max(each.relative_difference for each in outcomes),
        share_of_unequal_elements=max(each.share_of_unequal_elements for each in outcomes),
    )


def _launch_for_memory(name: str, plan: Plan) -> float:
    """MiB of the rank that needed most."""
    case = SoloCase(name=name, steps=MEMORY_STEPS, task=plan.task, exact_memory=True)
    return max(outcome.peak_mib - outcome.start_mib for outcome in launch_alone(case, plan.world))


def launch_alone(case: SoloCase, world: int) -> list[SoloOutcome]:
    """Start ranks that hold one trainer; what each saw."""
    return run_ranks(work_alone, world, case, device_type=case.task.device_type)


def summarise(
    names: tuple[str, str], plan: Plan, launches: list[Launch], peaks: Mapping[str, float]
) -> Row:
    """Medians over all launches, the pooled ratio, and the least agreement."""
    candidate, rival = names
    config = plan.task.config
    tokens = plan.world * config.batch * config.sequence
    return Row(
        candidate=candidate,
        rival=rival,
        candidate_figures=_figures([each.candidate for each in launches], tokens, peaks[candidate]),
        rival_figures=_figures([each.rival for each in launches], tokens, peaks[rival]),
        ratio=estimate_median_of_launches([each.ratios for each in launches]),
        limit=LIMITS.get(names) if plan.task.device_type == "cpu" and plan.world > 1 else None,
        steps=launches[0].steps,
        relative_difference=max(each.relative_difference for each in launches),
        share_of_unequal_elements=max(each.share_of_unequal_elements for each in launches),
        launches=launches,
    )


def _figures(seen: Sequence[Seen], tokens: int, peak_mib: float) -> Figures:
    seconds = statistics.median(time for each in seen for time in each.seconds)
    wires = [each.wire_bytes for each in seen if each.wire_bytes is not None]
    return Figures(
        ms=seconds * 1e3,
        tokens_per_s=tokens / seconds,
        peak_mib=peak_mib,
        wire_bytes=min(wires, default=None),
        loss=seen[0].loss,
    )
