"""What the runtime did, in its order: the last steps with their times, for whoever asks why nothing
happens, and all of them for whoever compares them with a plan.

A step names a kind and a unit's index, so it keeps nothing alive. Noting one is a clock and an
append, about an eighth of a microsecond.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from .in_flight import copy_of

KEPT_STEPS = 64
_now_s = time.monotonic


class Kind(Enum):
    """What a step does."""

    GATHER = "gather"
    FINISH_GATHER = "finish_gather"
    FORWARD = "forward"
    BACKWARD = "backward"
    RELEASE = "release"
    EXCHANGE = "exchange"
    ACCUMULATE = "accumulate"
    FINISH_EXCHANGE = "finish_exchange"
    STEP = "step"


@dataclass(slots=True)
class Trace:
    """What the runtime did, step by step: the last `KEPT_STEPS`, and all while `steps` is a list.

    `began_s`: when it was made (`time.monotonic`, as all its times).
    """

    steps: list[tuple[Kind, int]] | None = None
    began_s: float = field(default_factory=time.monotonic)
    _recent: deque[tuple[float, Kind, int]] = field(
        default_factory=lambda: deque(maxlen=KEPT_STEPS)
    )

    def add(self, kind: Kind, unit: int) -> None:
        """Record one step."""
        self._recent.append((_now_s(), kind, unit))
        if self.steps is not None:
            self.steps.append((kind, unit))

    def latest(self, most: int = KEPT_STEPS) -> list[tuple[float, Kind, int]]:
        """The last `most` steps at most, oldest first, each with its time. From any thread, and
        from signal handlers: nothing is waited for.
        """
        return copy_of(self._recent)[-most:]

    def latest_s(self) -> float:
        """When the last step was recorded, or this was made."""
        return max([self.began_s, *(at_s for at_s, _, _ in self.latest(1))])
