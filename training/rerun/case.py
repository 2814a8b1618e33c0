"""What is looked into while a step runs again, as one rank knows it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .evidence import Evidence, Suspect, suspects_in
from .random_states import RandomStates
from .validation import Result, Validations


@dataclass(frozen=True, slots=True)
class Case:
    """The rejected results of a first run, on all ranks; none: there is nothing to look into.

    result: that of this rank's suspect in the first run, if it has one. Of a step that is
    suspended, random_states: before it; validations: the messages of this rank's.
    """

    rank: int
    suspects: tuple[Suspect, ...] = ()
    result: tuple[Result, ...] = ()
    validations: tuple[str, ...] = ()
    random_states: tuple[Any, ...] = ()

    def opened(self, evidence: Sequence[Evidence], validations: Validations) -> "Case":
        """The one after a first run with this rank's `validations`; evidence: by rank."""
        case = Case(self.rank, suspects_in(evidence))
        own = case._own
        result = () if own is None else (validations.calls[own.rejection.call].result,)
        return replace(case, result=result)

    def suspended(
        self, suspects: tuple[Suspect, ...], validations: Validations, before: RandomStates
    ) -> "Case":
        """The same about `suspects`, left until there is other hardware."""
        return replace(
            self,
            suspects=suspects,
            result=tuple(x.cpu() if isinstance(x, Tensor) else x for x in self.result),
            validations=validations.messages,
            random_states=before.plain(),
        )

    def evidence(self, hardware: str, validations: Validations) -> Evidence:
        """What this rank knows from a run with these `validations`; waits for the device."""
        first, fatal = validations.rejections()
        own, mismatch = self._own, ""
        again = None if own is None else validations.again(own.rejection, self.result[0])
        if self.random_states and validations.messages != self.validations:
            mismatch = f"expected {self.validations}, got {validations.messages}"
        return Evidence(hardware, first, fatal, again, mismatch)

    @property
    def _own(self) -> Suspect | None:
        return next((one for one in self.suspects if one.rank == self.rank), None)
