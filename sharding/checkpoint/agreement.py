"""What ranks do alike when they save or load: they fail together, and mean the same thing."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from ..communicators import gather_objects
from ..errors import CommunicationError, in_words
from .ranks import Ranks

# A subclass stands before its base.
_SHAREABLE: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    OSError,
    TypeError,
    ValueError,
    CommunicationError,
)

_Report = tuple[tuple[type[Exception], str] | None, dict[str, tuple[str, str]], Any]


class Alike:
    """A block that all `ranks` leave alike: an error on some of them is raised on every one, and so
    is a difference in what they told with `tell`. After it `given` has what each gave, in order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.given: list[Any] = []
        self._ranks = ranks
        self._own: Any = None
        self._told: dict[str, tuple[str, str]] = {}

    def give(self, value: Any) -> None:
        """Have every rank get `value`, which can be pickled."""
        self._own = value

    def tell(self, name: str, value: str, described: str = "") -> None:
        """Have `value` of argument `name` compared with the other ranks'; an error shows
        `described` in its place.
        """
        self._told[name] = (value, described or value)

    def __enter__(self) -> Alike:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.given = [self._own]
        if self._ranks.group is None:
            return
        numbers = self._ranks.numbers
        reports: list[_Report] = [(None, {}, None)] * len(numbers)
        failure = None if error is None else _report(error)
        # Where one rank is interrupted, others may be too, and so be gone: its error stays.
        hides = () if error is None or isinstance(error, Exception) else (RuntimeError,)
        own = failure, self._told, self._own
        with contextlib.suppress(*hides):
            reports = gather_objects(
                own, self._ranks.group, self._ranks.device, "agreement on the checkpoint"
            )
        if error is not None:
            return
        self.given = [given for _, _, given in reports]
        for rank, (failure, _, _) in zip(numbers, reports, strict=True):
            if failure is not None:
                raise failure[0](f"rank {rank}: {failure[1]}")
        for rank, (_, told, _) in zip(numbers, reports, strict=True):
            for name, (value, described) in told.items():
                if value != reports[0][1][name][0]:
                    raise ValueError(
                        f"{name}: expected the same on every rank, got {reports[0][1][name][1]} on "
                        f"rank {numbers[0]} and {described} on rank {rank}; pass one value"
                    )


def _report(error: BaseException) -> tuple[type[Exception], str]:
    """What other ranks raise where one has `error`."""
    known = next((known for known in _SHAREABLE if isinstance(error, known)), RuntimeError)
    has_text = isinstance(error, Exception) and str(error)
    return known, str(error) if has_text else in_words(error)
