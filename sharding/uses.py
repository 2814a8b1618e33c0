"""What this rank has gathered and exchanged, by number: what ranks must have in common, and where
two of them differ.

    number    0                   1                   2
    rank 0    gather of unit a    gather of unit b    gather of unit d ...
    rank 1    gather of unit a    gather of unit b    end of forward       <- differs

The model, a number and a name make the tag of a message, so that gloo never takes one unit for
another. Where messages have no tags, a fingerprint of all of them says whether ranks agree.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .errors import communication_error
from .messages import listed

END_OF_FORWARD, END_OF_BACKWARD = "end of the forward", "end of the backward"
"""Stand in the record of gathers, behind those of the forward or backward."""
_KEPT, _IN_RING = 512, 511
_TAG_SPACE, _IN_TAG_SPACE, _TAG_STEP = 0x4000_0000, 0x3FFF_FFFF, 9973  # gloo's tags are 31 bits
_MASK, _FACTOR = 2**62 - 1, 0x5851_F42D_4C95_7F2D  # odd, so that what was added never fades

Record = tuple[int, list[str]]
"""The number of a use, and the names of all from there on."""


@dataclass(frozen=True, slots=True)
class UsePoint:
    """Where a `UseRecord` stood."""

    count: int
    fingerprint: int
    last: tuple[str, ...]


class UseRecord:
    """Names of gathers, or exchanges, in their order. The last ones are kept."""

    def __init__(self) -> None:
        self.count = 0
        self.model = 0
        self.fingerprint = 0
        """Of all uses so far, less than 2**62."""
        self._last = [""] * _KEPT
        self._codes: dict[str, int] = {}

    def note(self, what: str) -> int:
        """The next one is `what`. Returns the tag of its messages, which another one does not have
        under this number.
        """
        try:
            code = self._codes[what]
        except KeyError:
            code = self._codes[what] = zlib.crc32(what.encode(), self.model)
        number = self.count
        self._last[number & _IN_RING] = what
        self.fingerprint = (self.fingerprint * _FACTOR + code + 1) & _MASK
        self.count = number + 1
        return _TAG_SPACE | (number * _TAG_STEP + code) & _IN_TAG_SPACE

    def note_end(self, what: str) -> None:
        """A forward or backward is over, if it had any use."""
        if self.count and self._last[(self.count - 1) & _IN_RING] not in _ENDS:
            self.note(what)

    def point(self) -> UsePoint:
        """Where it stands, to `go_back` to."""
        return UsePoint(self.count, self.fingerprint, tuple(self._last))

    def go_back(self, point: UsePoint) -> None:
        """Forget what was noted since it stood at `point`: it never ran."""
        self.count, self.fingerprint, self._last = point.count, point.fingerprint, list(point.last)

    def latest(self, most: int = _KEPT // 2) -> Record:
        """The last `most` uses at most. Also for another thread, while this one goes on."""
        count = self.count
        start = max(count - most, 0)  # half of what is kept: what is noted meanwhile is not in it
        return start, [self._last[number & _IN_RING] for number in range(start, count)]

    def number_of(self, what: str) -> int | None:
        """The number of the latest use that is called so, if one is."""
        start, last = self.latest()
        places = (start + place for place in reversed(range(len(last))) if last[place] == what)
        return next(places, None)


_ENDS = (END_OF_FORWARD, END_OF_BACKWARD)


def _nothing_known() -> Exception | None:
    return None


@dataclass(eq=False, slots=True)
class Uses:
    """All that the ranks of one model do together. `agreements`: small collectives over all of
    them. `explain`: asked when something failed, for the error that says why, if one is known.
    `model`: which one of those that these ranks have sharded, from 0.
    """

    gathers: UseRecord = field(default_factory=UseRecord)
    exchanges: UseRecord = field(default_factory=UseRecord)
    agreements: int = 0
    explain: Callable[[], Exception | None] = _nothing_known
    model: int = 0

    def of_model(self, number: int) -> None:
        """From here on, tell its uses from those of other models, which may have the same names."""
        self.model = self.gathers.model = self.exchanges.model = number

    def failure(self, what: str, error: Exception) -> Exception:
        """What to raise in place of a backend's own `error` in `what`."""
        return self.explain() or communication_error(what, error)

    def numbered(self, what: str) -> tuple[str, int, str]:
        """The latest use that is called `what`: its kind ("gather", "exchange", "agreement"), its
        number among those, and `what`.
        """
        for kind, record in (("gather", self.gathers), ("exchange", self.exchanges)):
            number = record.number_of(what)
            if number is not None:
                return kind, number, what
        return "agreement", self.agreements - 1, what


@dataclass(frozen=True, slots=True)
class RankUses:
    """What one rank says of itself. `waits`: for which kind ("gather", "exchange", "agreement"),
    which number and what, if it does.
    """

    gathers: Record
    exchanges: Record
    agreements: int
    waits: tuple[str, int, str] | None

    def begun(self, kind: str) -> int:
        """How many of `kind` this rank has begun."""
        if kind == "agreement":
            return self.agreements
        start, names = self.gathers if kind == "gather" else self.exchanges
        return start + len(names)


def first_difference(uses: Sequence[RankUses | None]) -> str | None:
    """Where ranks, of those of which something is known, did not do the same, in words."""
    for kind in ("gathers", "exchanges"):
        known = [(rank, getattr(said, kind)) for rank, said in enumerate(uses) if said is not None]
        start = max((first for _, (first, _) in known), default=0)
        stop = max((first + len(names) for _, (first, names) in known), default=0)
        for number in range(start, stop):
            found: dict[str, int] = {}
            for rank, (first, names) in known:
                if number < first + len(names):
                    found.setdefault(names[number - first], rank)
            if len(found) > 1:
                (one, rank), (two, other) = list(found.items())[:2]
                return f"rank {rank} came to the {one} where rank {other} came to the {two}"
    return None


def deadlock(uses: Sequence[RankUses | None]) -> str | None:
    """Why no rank can go on, in words: every rank waits for what another has not begun."""
    texts = []
    for rank, said in enumerate(uses):
        if said is None or said.waits is None:
            return None
        kind, number, what = said.waits
        missing = [
            f"rank {other}"
            for other, theirs in enumerate(uses)
            if theirs is not None and theirs.begun(kind) <= number
        ]
        if not missing:
            return None
        texts.append(f"rank {rank} waits for the {what}, which {listed(missing)} did not begin")
    return listed(texts, "; ")


def standing(uses: Sequence[RankUses | None]) -> str:
    """Where the ranks stand, in words."""
    texts = []
    for rank, said in enumerate(uses):
        if said is None:
            text = "says nothing: it computes, or has gone"
        elif said.waits is None:
            text = "waits for nothing of this model"
        else:
            text = f"waits for the {said.waits[2]}"
        texts.append(f"rank {rank} {text}")
    return listed(texts, "; ")
