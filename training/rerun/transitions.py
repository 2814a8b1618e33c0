"""What comes next when something was found out about a step, in each mode: a table.

    IDLE --begins--> FIRST_RUN --accepted--> IDLE
                     FIRST_RUN --rejected--> RERUN --vanished----> IDLE: transient
                                             RERUN --reproduced--> SUSPENDED, exit 16
    SUSPENDED --begins--> RUN_ELSEWHERE --same hardware--> SUSPENDED, exit 16
                          RUN_ELSEWHERE --vanished--> IDLE: persistent, exit 17
                          RUN_ELSEWHERE --reproduced--> IDLE: bug, exit 17

SUSPENDED outlives the process, in a checkpoint; all other phases are IDLE there, RUN_ELSEWHERE is
SUSPENDED. Exit codes and verdicts are those of Megatron-Core's `rerun_state_machine`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ..launch.exit_codes import FAILED_ON_RESULT_VALIDATION, RESUME_TO_DISAMBIGUATE


class Mode(Enum):
    """What is done about rejected results.

    DISABLED: a fatal one is raised, others are passed over. VALIDATE_RESULTS: it is found out what
    they are due to. REPORT_DETERMINISM_STATS: each step runs twice and its results are compared; a
    fatal one is raised.
    """

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class Phase(Enum):
    """Where the machine is."""

    IDLE = "idle"
    FIRST_RUN = "first_run"
    RERUN = "rerun"
    SUSPENDED = "suspended"
    RUN_ELSEWHERE = "run_elsewhere"


class Found(Enum):
    """What all ranks know at the end of a run of the step; BEGINS: there was none yet.

    In a run whose results are new: ACCEPTED, or the first REJECTED one, FATALLY where any that is
    fatal was. In a run again, of the results that were rejected: all have VANISHED, FATALLY where
    one of them is fatal, or anything fatal was rejected now; or some were REPRODUCED; or some were
    computed on the SAME_HARDWARE as before, which says nothing.
    """

    BEGINS = "a step begins"
    ACCEPTED = "all results are accepted"
    REJECTED = "a result is rejected"
    REJECTED_FATALLY = "a fatal result is rejected"
    VANISHED = "the rejected result is another one now"
    VANISHED_FATALLY = "the rejected result is another one now, but fatal"
    REPRODUCED = "the rejected result is the same again"
    SAME_HARDWARE = "the rejected result was computed on the same hardware again"


class VerdictKind(Enum):
    """What a rejected result was due to; BUG: a bug of the program, or the result is correct."""

    TRANSIENT = "transient"
    PERSISTENT = "persistent"
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class Next:
    """What follows.

    runs: the step runs, the first time or, `rewinds`, again. raises: the fatal result is an error.
    exit_code: of the process, after a checkpoint of the state before the step if it `saves`; None:
    training goes on.
    """

    phase: Phase
    runs: bool = False
    rewinds: bool = False
    raises: bool = False
    saves: bool = False
    exit_code: int | None = None
    verdict: VerdictKind | None = None

    @property
    def told(self) -> str:
        """What is done, in words."""
        if self.exit_code is not None:
            return f"exits with code {self.exit_code}"
        return "the step runs again" if self.runs else "training goes on"


_RUN = Next(Phase.FIRST_RUN, runs=True)
_AGAIN = Next(Phase.RERUN, runs=True, rewinds=True)
_GO_ON = Next(Phase.IDLE)
_RAISE = Next(Phase.IDLE, raises=True)
_ASK_ELSEWHERE = Next(Phase.SUSPENDED, rewinds=True, saves=True, exit_code=RESUME_TO_DISAMBIGUATE)
# The checkpoint on disk asks already.
_ASK_ONCE_MORE = Next(Phase.SUSPENDED, rewinds=True, exit_code=RESUME_TO_DISAMBIGUATE)


def _end(kind: VerdictKind) -> Next:
    code = FAILED_ON_RESULT_VALIDATION
    return Next(Phase.IDLE, rewinds=True, saves=True, exit_code=code, verdict=kind)


_NEXT: Mapping[Mode, Mapping[tuple[Phase, Found], Next]] = {
    Mode.DISABLED: {
        (Phase.IDLE, Found.BEGINS): _RUN,
        (Phase.FIRST_RUN, Found.ACCEPTED): _GO_ON,
        (Phase.FIRST_RUN, Found.REJECTED): _GO_ON,
        (Phase.FIRST_RUN, Found.REJECTED_FATALLY): _RAISE,
    },
    Mode.REPORT_DETERMINISM_STATS: {
        (Phase.IDLE, Found.BEGINS): _RUN,
        (Phase.FIRST_RUN, Found.ACCEPTED): _AGAIN,
        (Phase.FIRST_RUN, Found.REJECTED): _AGAIN,
        (Phase.FIRST_RUN, Found.REJECTED_FATALLY): _RAISE,
        (Phase.RERUN, Found.ACCEPTED): _GO_ON,
        (Phase.RERUN, Found.REJECTED): _GO_ON,
        (Phase.RERUN, Found.REJECTED_FATALLY): _RAISE,
    },
    Mode.VALIDATE_RESULTS: {
        (Phase.IDLE, Found.BEGINS): _RUN,
        (Phase.FIRST_RUN, Found.ACCEPTED): _GO_ON,
        (Phase.FIRST_RUN, Found.REJECTED): _AGAIN,
        (Phase.FIRST_RUN, Found.REJECTED_FATALLY): _AGAIN,
        (Phase.RERUN, Found.VANISHED): Next(Phase.IDLE, verdict=VerdictKind.TRANSIENT),
        (Phase.RERUN, Found.VANISHED_FATALLY): _end(VerdictKind.TRANSIENT),
        (Phase.RERUN, Found.REPRODUCED): _ASK_ELSEWHERE,
        (Phase.SUSPENDED, Found.BEGINS): Next(Phase.RUN_ELSEWHERE, runs=True),
        (Phase.RUN_ELSEWHERE, Found.SAME_HARDWARE): _ASK_ONCE_MORE,
        (Phase.RUN_ELSEWHERE, Found.VANISHED): _end(VerdictKind.PERSISTENT),
        (Phase.RUN_ELSEWHERE, Found.VANISHED_FATALLY): _end(VerdictKind.PERSISTENT),
        (Phase.RUN_ELSEWHERE, Found.REPRODUCED): _end(VerdictKind.BUG),
    },
}


def next_of(mode: Mode, phase: Phase, found: Found) -> Next:
    """What follows where something was `found` in `phase`."""
    follows = _NEXT[mode].get((phase, found))
    assert follows is not None, f"{found} cannot be found in {phase}, mode {mode}"
    return follows


def saved_phase(phase: Phase) -> Phase:
    """What `phase` is in a checkpoint: a step that is under way begins anew."""
    asks = phase in (Phase.SUSPENDED, Phase.RUN_ELSEWHERE)
    return Phase.SUSPENDED if asks else Phase.IDLE
