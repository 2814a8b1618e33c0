"""What this rank has gathered and exchanged, by number: what ranks must have in common, and how two
of them differ.

    number    0          1          2            3             4
    rank 0    unit 0     unit 1     unit 3       end of forward ...
    rank 1    unit 0     unit 1     unit 2    <- number 2 differs

A number and a unit make the tag of a message, so that gloo never takes one unit for another. Where
messages have no tags, a fingerprint of all numbers says whether ranks agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from .messages import listed

END_OF_FORWARD, END_OF_BACKWARD = -1, -2
"""Stand beside the units' indices in a record."""
_KEPT = 512
_TAG_SPACE, _TAG_STEP = 0x51DE_0000, 9973
_MASK = (1 << 62) - 1


class UseRecord:
    """Units in the order of their gathers, or exchanges. The last ones are kept."""

    def __init__(self) -> None:
        self.count = 0
        self.fingerprint = 0
        """Of all uses so far, less than 2**62."""
        self._last = [END_OF_BACKWARD] * _KEPT

    def note(self, unit: int) -> int:
        """The next use is of `unit` (an index). Returns the tag of its messages, which no use of
        another unit has under the same number.
        """
        number = self.count
        self._last[number % _KEPT] = unit
        self.fingerprint = (self.fingerprint * 1_000_003 + unit + 3) & _MASK
        self.count = number + 1
        return _TAG_SPACE | ((number * _TAG_STEP + unit) & 0xFFFF)

    def note_end(self, what: int) -> None:
        """A forward or backward is over, if it had any use."""
        if self.count and self._last[(self.count - 1) % _KEPT] >= 0:
            self.note(what)

    def latest(self, most: int = _KEPT // 2) -> tuple[int, list[int]]:
        """The last `most` uses at most, after the number of the first of them. Also for another
        thread, while this one goes on.
        """
        count = self.count
        start = max(count - most, 0)  # half of what is kept: what is noted meanwhile is not in it
        return start, [self._last[number % _KEPT] for number in range(start, count)]

    def number_of(self, unit: int) -> int:
        """The number of the latest use of `unit`."""
        start, last = self.latest()
        return next(start + i for i in reversed(range(len(last))) if last[i] == unit)


@dataclass(frozen=True, slots=True)
class RankUses:
    """What one rank says of itself. `waits`: the kind ("gather", "exchange", "agreement"), the
    number and the unit it waits for, if it does.
    """

    gathers: tuple[int, list[int]]
    exchanges: tuple[int, list[int]]
    agreements: int
    waits: tuple[str, int, int] | None

    def begun(self, kind: str) -> int:
        """How many of `kind` this rank has begun."""
        if kind == "agreement":
            return self.agreements
        start, units = self.gathers if kind == "gather" else self.exchanges
        return start + len(units)


def first_difference(uses: Sequence[RankUses | None], names: Sequence[str]) -> str | None:
    """Where two ranks of which something is known used different units, in words."""
    for kind in ("gathers", "exchanges"):
        known = [(rank, getattr(said, kind)) for rank, said in enumerate(uses) if said is not None]
        start = max((first for _, (first, _) in known), default=0)
        stop = max((first + len(units) for _, (first, units) in known), default=0)
        for number in range(start, stop):
            found: dict[int, int] = {}
            for rank, record in known:
                if number < record[0] + len(record[1]):
                    found.setdefault(_at(record, number), rank)
            if len(found) > 1:
                (one, rank), (two, other) = list(found.items())[:2]
                return (
                    f"rank {rank} {_told(one, kind, names)} where rank {other} "
                    f"{_told(two, kind, names)}"
                )
    return None


def _at(record: tuple[int, list[int]], number: int) -> int:
    return record[1][number - record[0]]


def _told(unit: int, kind: str, names: Sequence[str]) -> str:
    if unit == END_OF_FORWARD:
        return "ended its forward"
    if unit == END_OF_BACKWARD:
        return "ended its backward"
    verb = "gathered" if kind == "gathers" else "exchanged the gradients of"
    return f"{verb} unit '{names[unit]}'"


def deadlock(uses: Sequence[RankUses | None], names: Sequence[str]) -> str | None:
    """Why no rank can go on, in words: every rank waits for what another has not begun."""
    texts = []
    for rank, said in enumerate(uses):
        if said is None or said.waits is None:
            return None
        kind, number, unit = said.waits
        missing = [
            other
            for other, theirs in enumerate(uses)
            if theirs is not None and theirs.begun(kind) <= number
        ]
        if not missing:
            return None
        texts.append(f"rank {rank} waits for {_awaited(kind, unit, names)}, not begun by {missing}")
    return "; ".join(texts)


def _awaited(kind: str, unit: int, names: Sequence[str]) -> str:
    if kind == "agreement":
        return "an agreement of all ranks"
    return f"the {kind} of unit '{names[unit]}'"


def standing(uses: Sequence[RankUses | None], names: Sequence[str]) -> str:
    """Where the ranks stand, in words."""
    texts = []
    for rank, said in enumerate(uses):
        if said is None:
            text = "says nothing, so it has gone or computes"
        elif said.waits is None:
            text = "uses no unit of it, and waits for none"
        else:
            text = f"waits for {_awaited(said.waits[0], said.waits[2], names)}"
        texts.append(f"rank {rank} {text}")
    return listed(texts, "; ")


def digest(texts: Sequence[str]) -> str:
    """A short name for `texts`."""
    return f"{zlib.crc32(repr(list(texts)).encode()):08x}"
