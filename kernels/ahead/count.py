"""Owns the counting of instructions in NVIDIA's machine code: of one path, or of the whole kernel.

What is counted is what one thread executes. Only `wide_paths` follows branches; for the others the
path of full tiles ends before another one begins. Loops are unrolled on all of these paths.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compile import CompiledKernel

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);")
_PADDING = re.compile(r"\bNOP\b|BRA `\(\.L_x")
_WIDE = re.compile(r"\b(?:LDG|STG)\.E(?:\.\w+)*\.(?:128|256)\b")
_WIDE_STORE = re.compile(r"\bSTG\.E(?:\.\w+)*\.(?:128|256)\b")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"(?P<guard>@\S+ )?BRA\S* +(?P<operand>!?U?P\d+, *)?`\((?P<label>\.L_x_\d+)\)")
_ACCESS_BYTES = 16
_MIN_PATH = 20
_MIN_PROGRAM = 50


class CountError(ValueError):
    """The code has not the shape that the count is for."""


def instructions_of(compiled: CompiledKernel) -> list[str]:
    """The instructions of a kernel for NVIDIA, in order."""
    found = [text.strip() for text in _INSTRUCTION.findall(compiled.assembly)]
    if not found:
        raise CountError(f"{compiled.target}: expected NVIDIA's machine code, got none")
    return found


def path_cost(compiled: CompiledKernel, elements_per_thread: float) -> float:
    """Instructions an element, from the start to the end of the first path that is wide.

    Up to the unconditional EXIT that follows the first store of 16 bytes. What comes after it is
    another path, or a division's routine for subnormal operands.
    """
    lines = instructions_of(compiled)
    store = next((at for at, line in enumerate(lines) if _WIDE_STORE.search(line)), None)
    if store is None:
        raise CountError("expected a store of 16 bytes, got none")
    end = next(at for at in range(store, len(lines)) if lines[at] == "EXIT")
    if end < _MIN_PATH:
        raise CountError(f"expected a path of more than {_MIN_PATH} instructions, got {end + 1}")
    return (end + 1) / elements_per_thread


@dataclass(frozen=True, slots=True)
class _Way:
    """How far a way through the code has been followed, and what was on it."""

    at: int = 0
    count: int = 0
    wide: int = 0
    stored: bool = False


def wide_paths(compiled: CompiledKernel) -> list[tuple[int, int]]:
    """(wide accesses, instructions) of each way through the code that stores, and only widely."""
    code, labels = _code_of(compiled)
    found: set[tuple[int, int]] = set()
    seen: set[_Way] = set()
    ways = [_Way()]
    while ways:
        way = ways.pop()
        if way in seen or way.at >= len(code):
            continue
        seen.add(way)
        if code[way.at] == "EXIT" and way.stored:
            found.add((way.wide, way.count + 1))
        ways += _after(way, code[way.at], labels)
    return sorted(found)


def _after(way: _Way, line: str, labels: dict[str, int]) -> list[_Way]:
    """The ways on from one instruction: none where it ends, loops, or stores narrowly."""
    if line == "EXIT" or ("STG" in line and not _WIDE_STORE.search(line)):
        return []
    wide = way.wide + bool(_WIDE.search(line))
    on = _Way(way.at + 1, way.count + 1, wide, way.stored or "STG" in line)
    branch = _BRANCH.match(line)
    if branch is None:
        return [on]
    target = labels[branch["label"]]
    if target <= way.at:
        return []
    jump = dataclasses.replace(on, at=target)
    return [jump, on] if branch["guard"] or branch["operand"] else [jump]


def _code_of(compiled: CompiledKernel) -> tuple[list[str], dict[str, int]]:
    """The instructions, and at which of them each label stands."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for text in compiled.assembly.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.search(text):
            code.append(instruction[1].strip())
    return code, labels


def costliest_path(compiled: CompiledKernel) -> float:
    """Instructions for each byte that a thread moves, on the wide path that has most of them."""
    paths = wide_paths(compiled)
    if not paths:
        raise CountError("expected a path without loops that stores 16 bytes, got none")
    return max(count / (wide * _ACCESS_BYTES) for wide, count in paths)


def wide_path_cost(compiled: CompiledKernel, elements_per_thread: float) -> float:
    """Instructions an element of the one path that is wide, where there may be loops."""
    paths = wide_paths(compiled)
    if len(paths) != 1:
        raise CountError(f"expected one path without loops that is wide, got {len(paths)}")
    return paths[0][1] / elements_per_thread


def program_cost(compiled: CompiledKernel, elements_per_thread: float) -> float:
    """Instructions an element of a kernel of one path, its end's padding left out."""
    counted = [line for line in instructions_of(compiled) if not _PADDING.search(line)]
    if len(counted) <= _MIN_PROGRAM:
        raise CountError(f"expected more than {_MIN_PROGRAM} instructions, got {len(counted)}")
    return len(counted) / elements_per_thread


def stretches(compiled: CompiledKernel, ends: tuple[str, ...]) -> list[tuple[int, int]]:
    """(wide accesses, instructions) of the code up to each of the mnemonics `ends` in turn."""
    found, wide, count = [], 0, 0
    for line in instructions_of(compiled):
        wide, count = wide + bool(_WIDE.search(line)), count + 1
        if line.split()[0] in ends:
            found.append((wide, count))
            wide, count = 0, 0
    return found


def full_path_cost(compiled: CompiledKernel, elements_per_thread: float) -> float:
    """Placeholder."""
    return program_cost(compiled, elements_per_thread)
