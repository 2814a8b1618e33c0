"""Curves in a terminal, of braille dots, or of stars where the terminal has no braille."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BRAILLE_BLANK = 0x2800


@dataclass(frozen=True, slots=True)
class Glyphs:
    """How dots make characters: `bits[y][x]` is that of the dot at (x, y) of a character's cell,
    and `first` the character without any.
    """

    bits: tuple[tuple[int, ...], ...]
    characters: str

    @property
    def dots_across(self) -> int:
        """Of a character."""
        return len(self.bits[0])


BRAILLE = Glyphs(
    ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)),
    "".join(chr(_BRAILLE_BLANK + bits) for bits in range(256)),
)
STARS = Glyphs(((1,),), " *")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return the finest ones that text in `encoding` can have."""
    try:
        BRAILLE.characters.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return STARS
    return BRAILLE


def plotted(values: Sequence[float], *, height: int, glyphs: Glyphs = BRAILLE) -> list[str]:
    """Return `height` lines with a curve through `values`, one for each dot across; the lines have
    `len(values) / glyphs.dots_across` characters. The highest value is at the top, the lowest at
    the bottom, a constant one at the bottom.

    Raises:
        ValueError: there are no values, or no lines.
    """
    if not values or height < 1:
        raise ValueError(
            f"expected values and lines, got {len(values)} and {height}; pass at least one of each"
        )
    down, across = len(glyphs.bits), glyphs.dots_across
    lowest, span = min(values), max(values) - min(values)
    bottom = height * down - 1
    levels = [bottom - (round((value - lowest) / span * bottom) if span else 0) for value in values]
    cells = [[0] * -(-len(values) // across) for _ in range(height)]
    for x, (before, level) in enumerate(zip([levels[0], *levels], levels, strict=False)):
        # Steep parts have no gaps: from beside the dot before.
        beside = before + (level > before) - (level < before)
        for y in range(min(beside, level), max(beside, level) + 1):
            cells[y // down][x // across] |= glyphs.bits[y % down][x % across]
    return ["".join(glyphs.characters[bits] for bits in line) for line in cells]
