"""Counts the instructions on the path of full tiles, which nearly all elements take.

What is counted is what one thread executes, on a way through the machine code from its start to its
end that follows branches and takes no loop. Of all ways the path of full tiles is the one that

    accesses most memory by 16 bytes at once, and no more than the elements of a thread have,
    first by accesses that are always made, then by those that depend on a mask,

and of several such ways the longest: a division of subnormal numbers is on it. What is called there
counts as one instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .compile import Access, Instruction

WIDE_BITS = 128


class CountError(ValueError):
    """The code has not the shape that the count is for."""


@dataclass(frozen=True, slots=True)
class Path:
    """A way through the code: its instructions, those of them that access global memory, and how
    many the pipe of integers takes.
    """

    instructions: int
    accesses: tuple[Access, ...]
    integers: int


class _State(NamedTuple):
    """What ways have in common: 16 bytes at once, always and altogether; and whether they loop."""

    always: int = 0
    wide: int = 0
    loops: bool = False


class _Way(NamedTuple):
    """The way of one state that is kept: its length, how much of that is the integers' pipe's, its
    last access, and the way to that one.
    """

    length: int
    integers: int = 0
    access: Access | None = None
    before: _Way | None = None


_Ways = dict[_State, _Way]


def full_path(instructions: Sequence[Instruction], thread_bytes: float) -> Path:
    """The path of full tiles, on which a thread moves `thread_bytes` at most.

    Raises `CountError` where there is none, or where it has loops.
    """
    return _path(instructions, thread_bytes, longest=True)


def shortest_full_path(instructions: Sequence[Instruction], thread_bytes: float) -> Path:
    """The same where there is a path for every dtype of as many bytes: the one of fewest
    instructions, since it has fewest elements.
    """
    return _path(instructions, thread_bytes, longest=False)


def _path(instructions: Sequence[Instruction], thread_bytes: float, *, longest: bool) -> Path:
    most = int(thread_bytes * 8 // WIDE_BITS)
    found = {
        state: way
        for state, way in _ways(instructions, longest=longest).items()
        if 0 < state.wide <= most
    }
    if not found:
        raise CountError(f"expected a path with up to {most} accesses of 16 bytes, got none")
    state = max(found, key=lambda state: (state.always, state.wide, not state.loops))
    if state.loops:
        raise CountError("expected a path of full tiles without loops, got one with loops")
    way = found[state]
    return Path(way.length, _accesses(way), way.integers)


def _ways(instructions: Sequence[Instruction], *, longest: bool) -> _Ways:
    """The longest, or shortest, way of each state to an end of the program."""
    arrived: list[_Ways] = [{} for _ in instructions]
    ends: _Ways = {}
    if arrived:
        arrived[0] = {_State(): _Way(0)}
    for at, instruction in enumerate(instructions):
        ways = dict(_stepped(arrived[at], instruction))
        arrived[at] = {}
        if instruction.is_end:
            _merge(ends, ways, longest=longest)
        jump = instruction.jumps_to
        if jump is not None and at < jump < len(arrived):
            _merge(arrived[jump], ways, longest=longest)
        elif jump is not None:
            ways = {state._replace(loops=True): way for state, way in ways.items()}
        if instruction.goes_on and at + 1 < len(arrived):
            _merge(arrived[at + 1], ways, longest=longest)
    return ends


def _stepped(ways: _Ways, instruction: Instruction) -> list[tuple[_State, _Way]]:
    """The ways with one instruction more."""
    access = instruction.access
    units = 0 if access is None else access.bits // WIDE_BITS
    always = 0 if instruction.text.startswith("@") else units
    return [
        (
            _State(state.always + always, state.wide + units, state.loops),
            _Way(way.length + 1, way.integers + instruction.is_integer, way.access, way.before)
            if access is None
            else _Way(way.length + 1, way.integers, access, way),
        )
        for state, way in ways.items()
    ]


def _merge(into: _Ways, ways: _Ways, *, longest: bool) -> None:
    for state, way in ways.items():
        kept = into.get(state)
        if kept is None or (way.length > kept.length) == longest:
            into[state] = way


def _accesses(way: _Way | None) -> tuple[Access, ...]:
    found: list[Access] = []
    while way is not None and way.access is not None:
        found.append(way.access)
        way = way.before
    return tuple(reversed(found))
