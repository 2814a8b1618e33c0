"""Bytes at peak on one rank, by the stream that owns them: arithmetic on numbers, nothing is run.

    stream     owns, on a GPU
    compute    parameters at rest; what autograd made of gradients until they are packed; what is
               not counted here: activations, optimizer state
    gather     parameters that are gathered for use and freed after it
    reduce     reduced gradients, buffers of exchanges
    none       symmetric memory, which no stream gives back

What one stream has freed torch's allocator gives to that stream alone, so what is reserved is the
sum of what each had at its own peak, even where these come at different times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """One unit on one rank, in bytes. `group`: units of one number are gathered together. `stays`:
    gathered parameters stay from forward to backward. `is_last`: its gradients come from the first
    to the last moment of backward, as the root's do. `gathered`: what is freed after use, and what
    a gather takes beside it. `unpacked`: whole gradients, as autograd makes them.
    """

    group: int
    stays: bool
    is_last: bool
    at_rest: int
    gathered: int
    reduced: int
    exchanging: int
    unpacked: int


@dataclass(frozen=True, slots=True)
class Depth:
    """How much is under way at once. `ahead`: groups that are gathered before the one in use.
    `exchanges`: whose buffers are alive. `unpacked`: units whose gradients wait for their pack.
    """

    ahead: int
    exchanges: int
    unpacked: int


@dataclass(frozen=True, slots=True)
class StreamBytes:
    """The most that each stream's own memory takes, and `symmetric` memory. `unpacked` is a part of
    `compute`.
    """

    compute: int
    gather: int
    reduce: int
    unpacked: int
    symmetric: int = 0

    @property
    def total(self) -> int:
        """What all of them keep from each other."""
        return self.compute + self.gather + self.reduce + self.symmetric


def stream_bytes(units: Sequence[UnitBytes], depth: Depth, *, symmetric: int = 0) -> StreamBytes:
    """The peaks under plain use of every unit: what stays, and the largest of what takes turns."""
    kept = sum(unit.gathered for unit in units if unit.stays)
    turns: dict[int, int] = {}
    for unit in units:
        if not unit.stays:
            turns[unit.group] = turns.get(unit.group, 0) + unit.gathered
    last = sum(unit.unpacked for unit in units if unit.is_last)
    before = _largest((unit.unpacked for unit in units if not unit.is_last), depth.unpacked)
    exchanging = _largest((unit.exchanging for unit in units), depth.exchanges)
    return StreamBytes(
        compute=sum(unit.at_rest for unit in units) + last + before,
        gather=kept + _largest(turns.values(), depth.ahead + 1),
        reduce=sum(unit.reduced for unit in units) + exchanging,
        unpacked=last + before,
        symmetric=symmetric,
    )


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])
