"""How a matplotlib figure becomes part of the page: its style, its colours, its names.

Figures are drawn in the light colours of page.css. In the page each colour is the name of one, so
that the reader's setting decides. Names that a figure refers to are salted with its own.
"""

from __future__ import annotations

import html
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DPI = 72
"""A point is a pixel of the page."""
FONT_PX = 11.0
_STYLE_SHEET = Path(__file__).with_name("page.css").read_text()
_LIGHT, _, _ = _STYLE_SHEET.partition("@media")
COLOURS = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", _LIGHT))
"""To draw with, by their names in the page."""
_NAMES = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
_COLOUR = re.compile(rf"(?<=: )({'|'.join(_NAMES)})")
# A part of a page has no name spaces of its own, and what is grouped is never referred to.
_LEFT_OUT = re.compile(r' xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"|(?<= )xlink:(?=href=)')
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": FONT_PX,
    "axes.titlesize": FONT_PX,
    "axes.labelsize": FONT_PX,
    "xtick.labelsize": FONT_PX - 1,
    "ytick.labelsize": FONT_PX - 1,
    "text.color": COLOURS["ink"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlelocation": "left",
    "axes.labelcolor": COLOURS["faint"],
    "axes.edgecolor": COLOURS["grid"],
    "xtick.color": COLOURS["grid"],
    "ytick.color": COLOURS["grid"],
    "xtick.labelcolor": COLOURS["faint"],
    "ytick.labelcolor": COLOURS["faint"],
    "grid.color": COLOURS["grid"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "figure.dpi": DPI,
}


def styled() -> AbstractContextManager[None]:
    """Draw and write figures inside: in the page's style, whatever the user's is."""
    return style.context(_STYLE, after_reset=True)


def new_axes(width: float, height: float, margins: tuple[float, float, float, float]) -> Axes:
    """Axes in a figure of their own; all in pixels, the margins being left, right, top, bottom."""
    left, right, top, bottom = margins
    figure = Figure(figsize=(width / DPI, height / DPI))
    place = (left / width, bottom / height)
    size = (1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure.add_axes((*place, *size))


def as_svg(axes: Axes, name: str, title: str) -> Markup:
    """The figure around `axes`, to be inlined. name: unlike any other figure's of the page; title:
    what it says, for those who cannot see it.
    """
    assert isinstance(axes.figure, Figure)
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        axes.figure.savefig(text, format="svg", metadata=nothing)
    _, _, figure = text.getvalue().partition("<svg")
    figure = _COLOUR.sub(lambda found: _NAMES[found[0]], _LEFT_OUT.sub("", figure))
    return Markup(f'<svg role="img" aria-label="{html.escape(title)}"{figure}')
