"""The machine's state in a checkpoint: each rank's own, of plain values.

All keys are always there, and none of the values is a dict or a list: whoever flattens states, as
PyTorch's distributed checkpoints do, finds the same entries whatever has happened.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from ...sharding.arguments import require_one_of
from .case import Case
from .evidence import Rejection, Suspect, Verdict
from .transitions import Mode, Phase, VerdictKind

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedState:
    """version, program, world_size, rank, mode: who saved it. step: the next one, or the one under
    way. phase: IDLE, or SUSPENDED, which alone has the following: suspects; result: that of this
    rank's suspect, if it has one; validations: the messages of this rank's; random_states: before
    the step. verdict: the last one. samples: see `Samples`.
    """

    version: int
    program: str
    world_size: int
    rank: int
    mode: str
    step: int
    phase: str
    suspects: tuple[Any, ...] = ()
    result: tuple[Any, ...] = ()
    validations: tuple[str, ...] = ()
    random_states: tuple[Any, ...] = ()
    verdict: tuple[Any, ...] = ()
    samples: tuple[Any, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The state as a checkpoint holds it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_suspended(self) -> bool:
        """Whether it asks for other hardware."""
        return self.phase == Phase.SUSPENDED.value


def parsed(state_dict: Mapping[str, Any]) -> SavedState:
    """The state in `state_dict`.

    Raises:
        ValueError: it is none.
    """
    names = [field.name for field in fields(SavedState)]
    got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict)
    if got != sorted(names):
        raise ValueError(
            f"rerun state: expected a state_dict() of RerunStateMachine, with {', '.join(names)}; "
            f"got {got}"
        )
    saved = SavedState(**state_dict)
    phases = [Phase.IDLE.value, Phase.SUSPENDED.value]
    if saved.phase not in phases:
        raise ValueError(
            f"rerun state: expected a phase of {', '.join(phases)}, got {saved.phase!r}; a state "
            "that was saved is none other"
        )
    return saved


def differences(expected: Mapping[str, Any], saved: SavedState) -> list[str]:
    """In words, in what `saved` is not of `expected`."""
    return [
        f"{name}: expected {value!r}, got {getattr(saved, name)!r}"
        for name, value in expected.items()
        if getattr(saved, name) != value
    ]


def plain_case(case: Case) -> dict[str, Any]:
    """What `SavedState` has of a suspended case."""
    return {
        "suspects": _plain_suspects(case.suspects),
        "result": case.result,
        "validations": case.validations,
        "random_states": case.random_states,
    }


def case_from(saved: SavedState) -> Case:
    """The case that was saved; one with nothing to look into, where the phase is IDLE."""
    return Case(
        saved.rank,
        _suspects_from(saved.suspects),
        saved.result,
        saved.validations,
        saved.random_states,
    )


def _plain_suspects(suspects: tuple[Suspect, ...]) -> tuple[Any, ...]:
    return tuple(astuple(suspect) for suspect in suspects)


def _suspects_from(plain: tuple[Any, ...]) -> tuple[Suspect, ...]:
    return tuple(
        Suspect(rank, Rejection(*rejection), tuple(hardware)) for rank, rejection, hardware in plain
    )


def plain_verdict(verdict: Verdict | None) -> tuple[Any, ...]:
    """`verdict` as a tuple."""
    if verdict is None:
        return ()
    suspects = _plain_suspects(verdict.suspects)
    return verdict.kind.value, verdict.step, suspects, verdict.again, verdict.others


def verdict_from(plain: tuple[Any, ...]) -> Verdict | None:
    """What `plain_verdict` returned, as it was."""
    if not plain:
        return None
    kind, step, suspects, again, others = plain
    return Verdict(VerdictKind(kind), step, _suspects_from(suspects), again, others)


def has_open_question(state_dict: Mapping[str, Any]) -> bool:
    """Whether a step was left that has to be run on other hardware: such a state must be loaded,
    where any other may be left alone, as when the number of ranks has changed.

    Raises:
        ValueError: it is no state of a `RerunStateMachine`.
    """
    return parsed(state_dict).is_suspended


def mode_named(name: str) -> Mode:
    """The mode of that name.

    Raises:
        ValueError: there is none.
    """
    require_one_of("mode", name, [mode.value for mode in Mode])
    return Mode(name)
