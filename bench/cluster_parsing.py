"""Types of the arguments that describe a cluster: its nodes, and numbers."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from .cluster_links import Cluster


def cluster_of(text: str) -> Cluster:
    """NODESxGPUS, two GPUs in all at least."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    given = Cluster(int(found[1]), int(found[2])) if found else Cluster(0, 0)
    if given.world_size < 2:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(
            f"expected nodes and GPUs of a node, two GPUs in all at least, got {text!r}; write "
            "such as 8x8 for 8 nodes of 8"
        )
    return given


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
