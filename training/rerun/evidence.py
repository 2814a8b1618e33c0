"""What ranks tell each other about a run of a step in which something was rejected, and what
follows from it: pure functions, so all ranks conclude alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .transitions import Found, Phase, VerdictKind


@dataclass(frozen=True, slots=True)
class Rejection:
    """A result that a rank's validation rejected: the `call`-th of the step, counted from 0, which
    gave `message`. shown: the result. shared: it was made of all ranks' work.
    """

    call: int
    message: str
    shown: str
    fatal: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rejected result that is looked into. hardware: where it may have been spoilt, the rank's
    own, or all ranks' if it was shared.
    """

    rank: int
    rejection: Rejection
    hardware: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """How the validation of this rank's suspect went in a run again.

    is_reproduced: within its tolerance. shown: the result now; empty where the program did not
    come to that validation.
    """

    is_reproduced: bool
    shown: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of one rank, about one run. first: what it rejected first, if anything; fatal: the first
    that is fatal. again: of its suspect, if it has one. mismatch: in what its validations are not
    those that the suspended step had, if in anything.
    """

    hardware: str
    first: Rejection | None
    fatal: Rejection | None
    again: Again | None
    mismatch: str = ""

    def told(self, rank: int) -> str:
        """What `rank` has rejected, if anything: a fatal result rather than another one."""
        one = self.fatal or self.first
        if one is None:
            return ""
        return (
            f"rank {rank} on {self.hardware}, validation {one.call} '{one.message}' got {one.shown}"
        )


def told_by(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """What was rejected; evidence: by rank."""
    return tuple(told for rank, one in enumerate(evidence) if (told := one.told(rank)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rejected results of `step` were due to. shown, again: each one's in the first and
    the last run. others: what was rejected in the last run beside them.
    """

    kind: VerdictKind
    step: int
    suspects: tuple[Suspect, ...]
    again: tuple[str, ...]
    others: tuple[str, ...] = ()

    def line(self) -> str:
        """In one line, which begins with `verdict: transient`, `persistent` or `bug`."""
        told = "; ".join(map(_told, self.suspects, self.again))
        more = f"; rejected in that run: {'; '.join(self.others)}" if self.others else ""
        return f"verdict: {self.kind.value} {_MEANING[self.kind]}, step {self.step}: {told}{more}"


_MEANING = {
    VerdictKind.TRANSIENT: "fault of hardware, not seen again on the same",
    VerdictKind.PERSISTENT: "fault of hardware, seen again on it and not elsewhere",
    VerdictKind.BUG: "in the program, or a correct result: the same on other hardware",
}


def _told(suspect: Suspect, again: str) -> str:
    where = "one of " if len(suspect.hardware) > 1 else ""
    rejection = suspect.rejection
    return (
        f"rank {suspect.rank} on {where}{', '.join(suspect.hardware)}, validation "
        f"{rejection.call} '{rejection.message}' got {rejection.shown}, then "
        f"{again or 'did not come'}"
    )


def suspects_in(evidence: Sequence[Evidence]) -> tuple[Suspect, ...]:
    """What to look into after a first run; evidence: by rank.

    The earliest validation at which any rank rejected: what it rejects later may follow from it, on
    other ranks too.
    """
    calls = [one.first.call for one in evidence if one.first is not None]
    earliest = min(calls)
    everywhere = tuple(sorted({one.hardware for one in evidence}))
    return tuple(
        Suspect(rank, one.first, everywhere if one.first.shared else (one.hardware,))
        for rank, one in enumerate(evidence)
        if one.first is not None and one.first.call == earliest
    )


def found_in_first_run(*, is_rejected: bool, is_fatal: bool) -> Found:
    """What is found in a run whose results are new."""
    if is_fatal:
        return Found.REJECTED_FATALLY
    return Found.REJECTED if is_rejected else Found.ACCEPTED


def found_again(phase: Phase, suspects: Sequence[Suspect], evidence: Sequence[Evidence]) -> Found:
    """What is found about `suspects` in a run again; evidence: by rank."""
    if phase is Phase.RUN_ELSEWHERE:
        now = {one.hardware for one in evidence}
        for suspect in suspects:
            own = {evidence[suspect.rank].hardware}
            if set(suspect.hardware) & (now if suspect.rejection.shared else own):
                return Found.SAME_HARDWARE
    if phase is Phase.RUN_ELSEWHERE and any(
        not _again(s, evidence).is_reproduced for s in suspects
    ):
        return Found.VANISHED
    if any(_again(suspect, evidence).is_reproduced for suspect in suspects):
        return Found.REPRODUCED
    is_fatal = any(suspect.rejection.fatal for suspect in suspects) or any(
        one.fatal is not None for one in evidence
    )
    return Found.VANISHED_FATALLY if is_fatal else Found.VANISHED


def looked_into(
    found: Found, suspects: Sequence[Suspect], evidence: Sequence[Evidence]
) -> tuple[Suspect, ...]:
    """The suspects that `found` is about: where some were reproduced, those alone."""
    if found in (Found.REPRODUCED, Found.VANISHED, Found.VANISHED_FATALLY):
        wanted = found is Found.REPRODUCED
        return tuple(s for s in suspects if _again(s, evidence).is_reproduced == wanted)
    return tuple(suspects)


def verdict_on(
    kind: VerdictKind, step: int, suspects: Sequence[Suspect], evidence: Sequence[Evidence]
) -> Verdict:
    """The verdict, with what is told of it."""
    others = () if kind is VerdictKind.BUG else told_by(evidence)
    again = tuple(
        f"{_again(suspect, evidence).shown} on {evidence[suspect.rank].hardware}"
        if _again(suspect, evidence).shown
        else ""
        for suspect in suspects
    )
    return Verdict(kind, step, tuple(suspects), again, others)


def _again(suspect: Suspect, evidence: Sequence[Evidence]) -> Again:
    again = evidence[suspect.rank].again
    assert again is not None, "a rank judges its own suspect"
    return again
