"""Types of arguments that several commands of this folder take, and options that they share."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...training.options import GRAD_WIRES, PARAM_WIRES

DEVICES = ("auto", "cpu", "cuda")
_SUFFIXES = {"": 1, "k": 1024, "K": 1024, "M": 1024**2, "G": 1024**3}
_MAX_SIZE = 2**40
_BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_BITS_PER_S |= {"MB/s": 8e6, "GB/s": 8e9, "TB/s": 8e12}


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}; pass such as 4"
        )
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Such numbers with commas between them; ascending, each once."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def size(text: str) -> int:
    """A whole number of at least 1, with k, M or G behind it or not."""
    found = re.fullmatch(r"(\d{1,15})([kKMG]?)", text)
    number = int(found[1]) * _SUFFIXES[found[2]] if found else 0
    if not 1 <= number <= _MAX_SIZE:
        raise argparse.ArgumentTypeError(
            f"expected a number from 1 to {_MAX_SIZE}, got {text!r}; pass such as 65536, 64k or 1M"
        )
    return number


def sizes(text: str) -> tuple[int, ...]:
    """Such numbers with commas between them, in their order, each once."""
    return tuple(dict.fromkeys(map(size, text.split(","))))


@dataclass(frozen=True, slots=True)
class Rate:
    """Of a link or a memory; `text` as it was given."""

    text: str
    bits_per_s: float

    @property
    def gb_per_s(self) -> float:
        """In GB of 1e9 bytes a second."""
        return self.bits_per_s / 8e9

    def __str__(self) -> str:
        gigabytes = f"{self.gb_per_s:g} GB/s"
        return f"{gigabytes} ({self.text})" if self.text.endswith("bit") else gigabytes


def rate(text: str) -> Rate:
    """A positive number and its unit: bits a second as tc takes them, or bytes a second with /s;
    powers of 1000.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([A-Za-z/]+)", text)
    if not found or found[2] not in _BITS_PER_S or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"expected a rate, got {text!r}; write a positive number with one of "
            f"{', '.join(_BITS_PER_S)} behind it, such as 250mbit or 50GB/s"
        )
    return Rate(text, float(found[1]) * _BITS_PER_S[found[2]])


def rates(text: str) -> tuple[Rate, ...]:
    """Such rates with commas between them, in their order, each once."""
    return tuple(dict.fromkeys(map(rate, text.split(","))))


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them, as they were given."""
    return tuple(text.split(","))


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Such names out of `known`."""

    def known_names(text: str) -> tuple[str, ...]:
        given = names(text)
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, got {', '.join(unknown)}; choose of these"
            )
        return given

    return known_names


def is_wire_pair(name: str) -> bool:
    """Whether it is GRADIENTS/WEIGHTS, formats by the names of `MixedPrecisionPolicy`."""
    gradients, _, weights = name.partition("/")
    return gradients in GRAD_WIRES and weights in PARAM_WIRES


def trainers_of(rivals: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of `rivals`, and pairs of wires, with commas between them; each once."""
    known = [
        *rivals,
        f"GRADIENTS/WEIGHTS of {', '.join(GRAD_WIRES)} and of {', '.join(PARAM_WIRES)}",
    ]

    def trainers(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(names(text)))
        unknown = [name for name in given if name not in rivals and not is_wire_pair(name)]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, got {', '.join(map(repr, unknown))}; pass "
                "such as nvfp4/mxfp8"
            )
        return given

    return trainers


def add_compiling_options(parser: argparse.ArgumentParser, *, written: str) -> None:
    """Those of a command that compiles kernels; `written` says what --json writes."""
    parser.add_argument("--op", type=names, metavar="OP,...", help="these ops alone (default: all)")
    parser.add_argument(
        "--jobs",
        type=count,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that compile (default: one a core)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write {written} here as well")
