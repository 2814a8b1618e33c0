"""Whether plain tensors over a unit's memory are in other hands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lent:
    """Noted once and for good: whoever got such a tensor may keep it, and what a collective, or a
    write through `.data`, does to it leaves no trace in version counters.
    """

    out: bool = False
