"""What the runtime did in a step, in its order, for whoever compares it with a plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    """What the runtime did, step by step, while `steps` is a list; free while it is None."""

    steps: list[tuple[Kind, int]] | None = None

    def add(self, kind: Kind, unit: int) -> None:
        """Record one step."""
        if self.steps is not None:
            self.steps.append((kind, unit))
