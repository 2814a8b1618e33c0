"""Types of arguments that several commands of this folder take, and options that they share."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

DEVICES = ("auto", "cpu", "cuda")
_SUFFIXES = {"": 1, "k": 1024, "K": 1024, "M": 1024**2, "G": 1024**3}
_MAX_SIZE = 2**40
_RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MIN_RATE, _MAX_RATE = 10**6, 10**11


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


def rate(text: str) -> int:
    """Bits a second of a link: a number with kbit, mbit or gbit behind it, powers of 1000 as tc
    takes them.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(kbit|mbit|gbit)", text.lower())
    bits_per_s = round(float(found[1]) * _RATES[found[2]]) if found else 0
    if not _MIN_RATE <= bits_per_s <= _MAX_RATE:
        raise argparse.ArgumentTypeError(
            f"expected a rate from 1mbit to 100gbit, got {text!r}; pass such as 250mbit or 1gbit"
        )
    return bits_per_s


def rates(text: str) -> tuple[int, ...]:
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
