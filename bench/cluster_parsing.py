"""Types of the arguments that describe a cluster: rates with a unit, its shape, numbers."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from .cluster_links import Shape

_GBIT = {"mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
_GB_PER_S = {name: gbit / 8 for name, gbit in _GBIT.items()} | {"MBs": 1e-3, "GBs": 1.0, "TBs": 1e3}


@dataclass(frozen=True, slots=True)
class Rate:
    """`text` as it was given."""

    text: str
    gb_per_s: float

    def __str__(self) -> str:
        gigabytes = f"{self.gb_per_s:g} GB/s"
        return f"{gigabytes} ({self.text})" if self.text.endswith("bit") else gigabytes


def rate(text: str) -> Rate:
    """A positive number and its unit: bits or bytes a second, by powers of ten."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([A-Za-z]+)", text)
    if not found or found[2] not in _GB_PER_S or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"expected a rate such as 400gbit or 50GBs, got {text!r}; write a positive number with "
            f"one of {', '.join(_GB_PER_S)} behind it"
        )
    return Rate(text, float(found[1]) * _GB_PER_S[found[2]])


def rates(text: str) -> tuple[Rate, ...]:
    """Such rates with commas between them, in their order."""
    return tuple(map(rate, text.split(",")))


def shape(text: str) -> Shape:
    """NODESxGPUS, two GPUs in all at least."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    shape = Shape(int(found[1]), int(found[2])) if found else Shape(0, 0)
    if shape.world_size < 2:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(
            f"expected nodes and GPUs of a node, two GPUs in all at least, got {text!r}; write "
            "such as 8x8 for 8 nodes of 8"
        )
    return shape


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and fits(found)):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}; pass such a one")
        return found

    return number


positive = _number("a number above 0", lambda number: number > 0)
not_negative = _number("a number of at least 0", lambda number: number >= 0)
share = _number("a number above 0, at most 1", lambda number: 0 < number <= 1)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 0, got {text!r}; pass such as 4"
        )
    return int(text)
