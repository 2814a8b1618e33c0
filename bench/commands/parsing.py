"""Types of arguments that several commands of this folder take."""

import argparse
from collections.abc import Callable, Sequence


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Such numbers with commas between them; ascending, each once."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `known` with commas between them, as they were given."""

    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, got {', '.join(unknown)}"
            )
        return given

    return names
