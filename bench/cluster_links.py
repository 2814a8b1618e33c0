"""A cluster's links, and what collectives move over them.

    nvlink    inside a node, a GPU's own; GB/s one way
    nic       between nodes, a GPU's own; GB/s one way

Of a buffer of n bytes over N ranks in nodes of R of them (R = 1: one of each node):

    collective     as                    over a GPU's NVLink          over its NIC
    all-gather     NCCL's rings: each    n (N-1)/N (R-1)/R; all of    n (N-1)/N / R
                   GPU hands on all      it where N = R
                   parts but one, over
                   R rings a NIC each
    all-to-all     a message a peer      n (R-1)/N                    n (N-R)/N

Each of them waits N - 1 times for a message's latency: the steps of a ring follow each other, and
messages are issued one by one.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from .virtual_time import Work

NVLINK, NIC = "nvlink", "nic"
_BITS, _BYTES = {"mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}, {"MBs": 1e-3, "GBs": 1.0, "TBs": 1e3}
_GB_PER_S = {**{name: gbit / 8 for name, gbit in _BITS.items()}, **_BYTES}


@dataclass(frozen=True, slots=True)
class Span:
    """How many ranks a group has, and how many of them a node has."""

    ranks: int
    per_node: int

    def gather(self, nbytes: float, latency_ms: float) -> Work:
        """An all-gather into `nbytes` a rank."""
        passed = nbytes * (self.ranks - 1) / self.ranks
        away = passed / self.per_node if self.ranks > self.per_node else 0.0
        return self._work(passed - away, away, latency_ms)

    def exchange(self, nbytes: float, latency_ms: float) -> Work:
        """An all-to-all of `nbytes` a rank."""
        part = nbytes / self.ranks
        inside, away = self.per_node - 1, self.ranks - self.per_node
        return self._work(inside * part, away * part, latency_ms)

    def _work(self, inside: float, away: float, latency_ms: float) -> Work:
        return Work(latency_ms * (self.ranks - 1), {NVLINK: inside, NIC: away})


@dataclass(frozen=True, slots=True)
class Rate:
    """`text` as it was given."""

    text: str
    gb_per_s: float

    def __str__(self) -> str:
        return f"{self.text} ({self.gb_per_s:g} GB/s)"


def rate(text: str) -> Rate:
    """A positive number and its unit; bits and bytes of a second, powers of ten."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+?)(?:/s)?", text)
    unit = found[2] if found else ""
    unit = unit if unit in _GB_PER_S else f"{unit}s"  # GB/s
    if not found or unit not in _GB_PER_S or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"expected a rate such as 400gbit or 50GBs, got {text!r}; write a positive number and "
            f"one of {', '.join(_GB_PER_S)} behind it"
        )
    return Rate(text, float(found[1]) * _GB_PER_S[unit])


def rates(text: str) -> tuple[Rate, ...]:
    """Such rates with commas between them, in their order."""
    return tuple(map(rate, text.split(",")))


@dataclass(frozen=True, slots=True)
class Shape:
    """`nodes` of `per_node` GPUs."""

    nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.per_node


def shape(text: str) -> Shape:
    """NODESxGPUS, both at least 1 and not both 1."""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    shape = Shape(int(found[1]), int(found[2])) if found else Shape(0, 0)
    if shape.world_size < 2:
        raise argparse.ArgumentTypeError(
            f"expected nodes and GPUs of a node, two GPUs at least, got {text!r}; write such as "
            "8x8 for 8 nodes of 8"
        )
    return shape
