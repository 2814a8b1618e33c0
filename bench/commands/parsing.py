"""Types of arguments that several commands of this folder take."""

import argparse
import re
from collections.abc import Callable, Sequence

_SUFFIXES = {"": 1, "k": 1024, "M": 1024**2, "G": 1024**3}
_MAX_SIZE = 2**40


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
    found = re.fullmatch(r"(\d{1,15})([kMG]?)", text)
    number = int(found[1]) * _SUFFIXES[found[2]] if found else 0
    if not 1 <= number <= _MAX_SIZE:
        raise argparse.ArgumentTypeError(
            f"expected a number from 1 to {_MAX_SIZE}, got {text!r}; pass such as 65536, 64k or 1M"
        )
    return number


def sizes(text: str) -> tuple[int, ...]:
    """Such numbers with commas between them, in their order, each once."""
    return tuple(dict.fromkeys(map(size, text.split(","))))


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `known` with commas between them, as they were given."""

    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, got {', '.join(unknown)}; choose of these"
            )
        return given

    return names
