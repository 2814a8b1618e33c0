"""The table of transitions and what is found, over everything that can be told to them."""

import itertools

import pytest

from sidestream.training.rerun.evidence import (
    Again,
    Evidence,
    Rejection,
    Suspect,
    found_again,
    found_in_first_run,
    looked_into,
    suspects_in,
    verdict_on,
)
from sidestream.training.rerun.transitions import (
    Found,
    Mode,
    Phase,
    VerdictKind,
    next_of,
    saved_phase,
)

FIRST = (Found.ACCEPTED, Found.REJECTED, Found.REJECTED_FATALLY)
AGAIN = (Found.VANISHED, Found.VANISHED_FATALLY, Found.REPRODUCED)
# What can be found where: everything else is refused.
POSSIBLE = {
    Mode.DISABLED: {Phase.IDLE: (Found.BEGINS,), Phase.FIRST_RUN: FIRST},
    Mode.REPORT_DETERMINISM_STATS: {
        Phase.IDLE: (Found.BEGINS,),
        Phase.FIRST_RUN: FIRST,
        Phase.RERUN: FIRST,
    },
    Mode.VALIDATE_RESULTS: {
        Phase.IDLE: (Found.BEGINS,),
        Phase.FIRST_RUN: FIRST,
        Phase.RERUN: AGAIN,
        Phase.SUSPENDED: (Found.BEGINS,),
        Phase.RUN_ELSEWHERE: (*AGAIN, Found.SAME_HARDWARE),
    },
}


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_every_phase_and_finding_has_one_way_on_or_none(mode: Mode) -> None:
    for phase, found in itertools.product(Phase, Found):
        if found not in POSSIBLE[mode].get(phase, ()):
            with pytest.raises(AssertionError, match="cannot be found"):
                next_of(mode, phase, found)
            continue
        follows = next_of(mode, phase, found)
        # It goes where something can be found again, and never both on and out.
        assert follows.phase in POSSIBLE[mode]
        assert follows.runs == (
            follows.phase in (Phase.FIRST_RUN, Phase.RERUN, Phase.RUN_ELSEWHERE)
        )
        assert follows.runs + follows.raises + (follows.exit_code is not None) <= 1
        # Whoever exits leaves the state before the step; a checkpoint is made by no one else.
        assert follows.exit_code is None or follows.rewinds
        assert not follows.saves or follows.exit_code is not None
        # A verdict is one that this finding allows, and comes with every 17, and with no 16.
        assert (follows.exit_code == 17) <= (follows.verdict is not None)
        assert (follows.exit_code == 16) == (follows.phase is Phase.SUSPENDED)
        assert follows.verdict in EXPECTED.get((phase, found), (None,))


EXPECTED = {
    (Phase.RERUN, Found.VANISHED): (VerdictKind.TRANSIENT,),
    (Phase.RERUN, Found.VANISHED_FATALLY): (VerdictKind.TRANSIENT,),
    (Phase.RUN_ELSEWHERE, Found.VANISHED): (VerdictKind.PERSISTENT,),
    (Phase.RUN_ELSEWHERE, Found.VANISHED_FATALLY): (VerdictKind.PERSISTENT,),
    (Phase.RUN_ELSEWHERE, Found.REPRODUCED): (VerdictKind.BUG,),
}


def test_from_every_rejection_there_is_a_verdict_within_two_restarts() -> None:
    """All paths from a rejected first run, restarts included, end in a verdict, unless a place is
    the same again and again.
    """
    mode, ends = Mode.VALIDATE_RESULTS, set()

    def walk(phase: Phase, path: tuple[Found, ...]) -> None:
        assert len(path) < 8
        for found in POSSIBLE[mode][phase]:
            if path.count(Found.SAME_HARDWARE) and found is Found.SAME_HARDWARE:
                continue
            follows = next_of(mode, phase, found)
            if follows.phase is Phase.IDLE:
                assert follows.verdict is not None
                ends.add(follows.verdict)
            else:
                walk(
                    saved_phase(follows.phase) if follows.exit_code else follows.phase,
                    (*path, found),
                )

    for found in (Found.REJECTED, Found.REJECTED_FATALLY):
        walk(next_of(mode, Phase.FIRST_RUN, found).phase, (found,))
    assert ends == set(VerdictKind)


def test_in_a_checkpoint_a_step_begins_anew() -> None:
    saved = {phase: saved_phase(phase) for phase in Phase}
    assert {phase for phase in Phase if saved[phase] is Phase.SUSPENDED} == {
        Phase.SUSPENDED,
        Phase.RUN_ELSEWHERE,
    }
    assert set(saved.values()) == {Phase.IDLE, Phase.SUSPENDED}


# ---- what is found

BEFORE, OTHER = ("gpu 0", "gpu 1"), ("gpu 2", "gpu 3")
ROTATED, KEPT = ("gpu 1", "gpu 0"), BEFORE


def rejection(call: int = 0, *, fatal: bool = True, shared: bool = False) -> Rejection:
    return Rejection(call, "loss", "nan", fatal, shared)


def evidence(first: Rejection | None, again: Again | None, hardware: str) -> Evidence:
    return Evidence(hardware, first, first if first and first.fatal else None, again)


def test_what_a_run_whose_results_are_new_finds() -> None:
    found = [
        found_in_first_run(is_rejected=rejected, is_fatal=fatal)
        for rejected, fatal in [(False, False), (True, False), (True, True)]
    ]
    assert found == list(FIRST)


def test_suspects_are_those_of_the_earliest_validation() -> None:
    told = [
        evidence(rejection(3), None, "gpu 0"),
        evidence(rejection(1), None, "gpu 1"),
        evidence(None, None, "gpu 2"),
        evidence(rejection(1, shared=True), None, "gpu 3"),
    ]
    suspects = suspects_in(told)
    assert [(one.rank, one.hardware) for one in suspects] == [
        (1, ("gpu 1",)),
        (3, ("gpu 0", "gpu 1", "gpu 2", "gpu 3")),
    ]


def expected(phase: Phase, shared: bool, same: list[bool], fatal: bool, now: tuple[str, ...]):
    """What is found, in the order of what matters. same: of the ranks under suspicion."""
    if phase is Phase.RUN_ELSEWHERE:
        moved = [now[rank] != BEFORE[rank] for rank in range(len(same))]
        if now != OTHER and (shared or not all(moved)):
            return Found.SAME_HARDWARE
        return Found.REPRODUCED if all(same) else Found.VANISHED
    if any(same):
        return Found.REPRODUCED
    return Found.VANISHED_FATALLY if fatal else Found.VANISHED


@pytest.mark.parametrize("phase", [Phase.RERUN, Phase.RUN_ELSEWHERE], ids=lambda x: x.value)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("num_suspects", [1, 2])
def test_what_a_run_again_finds(phase: Phase, shared: bool, num_suspects: int) -> None:
    truths = itertools.product([False, True], repeat=num_suspects + 2)
    for (*same, fatal, rejects_more), now in itertools.product(truths, (KEPT, ROTATED, OTHER)):
        first = [rejection(fatal=fatal, shared=shared)] * num_suspects + [None] * (2 - num_suspects)
        suspects = suspects_in(
            [evidence(x, None, place) for x, place in zip(first, BEFORE, strict=True)]
        )
        told = [
            evidence(
                rejection(5) if rejects_more else None,
                Again(same[rank], "1") if rank < num_suspects else None,
                now[rank],
            )
            for rank in range(2)
        ]
        found = found_again(phase, suspects, told)
        assert found == expected(phase, shared, same, fatal or rejects_more, now), (
            same,
            fatal,
            now,
        )
        assert found in POSSIBLE[Mode.VALIDATE_RESULTS][phase]
        kind = next_of(Mode.VALIDATE_RESULTS, phase, found).verdict
        about = looked_into(found, suspects, told)
        assert about
        if kind is not None:
            line = verdict_on(kind, 7, about, told).line()
            assert line.startswith(f"verdict: {kind.value} ") and "step 7" in line
            assert all(f"rank {one.rank} on" in line for one in about)
            # What was rejected in the run that acquits is told too.
            assert (kind is VerdictKind.BUG) or ("rejected in that run" in line) == rejects_more


def test_a_validation_that_did_not_come_is_told() -> None:
    suspect = Suspect(0, rejection(), ("gpu 0",))
    told = [evidence(None, Again(is_reproduced=False, shown=""), "gpu 0")]
    assert found_again(Phase.RERUN, [suspect], told) is Found.VANISHED_FATALLY
    line = verdict_on(VerdictKind.TRANSIENT, 1, [suspect], told).line()
    assert line.endswith("got nan, then did not come")
