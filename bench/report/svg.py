"""Owns how a matplotlib figure becomes part of the page: its style, its names, its colours.

Every name in a figure begins with the figure's own, so that those of two figures never clash, and
hashes are salted, so that the same figure is the same text. Colours become those of `look`, fonts
the page's.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .look import COLOURS, light

DPI = 72
"""A point is a pixel of the page."""
FONT_PX = 11.0
_NAMES = {pair[0]: name for name, pair in COLOURS.items()}
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_FONT = re.compile(r"'?DejaVu Sans'?(?:, sans-serif)?")
_REFERENCE = re.compile(r"url\(#")
_DROPPED = ("metadata",)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sidestream",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": FONT_PX,
    "axes.titlesize": FONT_PX,
    "axes.labelsize": FONT_PX,
    "xtick.labelsize": FONT_PX - 1,
    "ytick.labelsize": FONT_PX - 1,
    "text.color": light("ink"),
    "axes.titlecolor": light("ink"),
    "axes.labelcolor": light("faint"),
    "axes.edgecolor": light("grid"),
    "xtick.color": light("grid"),
    "ytick.color": light("grid"),
    "xtick.labelcolor": light("faint"),
    "ytick.labelcolor": light("faint"),
    "grid.color": light("grid"),
    "grid.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.edgecolor": "none",
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw and write figures inside: in the page's style, whatever the user's is."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_axes(width: float, height: float, margins: tuple[float, float, float, float]) -> Axes:
    """Axes in a figure of their own; all in pixels, the margins being left, right, top, bottom."""
    left, right, top, bottom = margins
    figure = Figure(figsize=(width / DPI, height / DPI))
    place = (left / width, bottom / height)
    size = (1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure.add_axes((*place, *size))


def as_svg(axes: Axes, name: str, title: str) -> str:
    """The figure around `axes`, to be inlined. title: what it says, for those who cannot see it."""
    assert isinstance(axes.figure, Figure)
    text = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    axes.figure.savefig(text, format="svg", metadata=nothing)
    root = ElementTree.fromstring(text.getvalue())
    _adapt(root, name)
    width, height = (root.attrib["viewBox"].split()[index] for index in (2, 3))
    root.attrib |= {"width": width, "height": height, "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(root: ElementTree.Element, name: str) -> None:
    """Make it a part of the page: own names, the page's colours and font, no namespaces."""
    for parent in root.iter():
        parent.tag = _bare(parent.tag)
        for child in [child for child in parent if _bare(child.tag) in _DROPPED]:
            parent.remove(child)
        for key, value in list(parent.attrib.items()):
            del parent.attrib[key]
            parent.attrib[_bare(key)] = _adapted(_bare(key), value, name)
        if parent.tag == "style":
            parent.text = f".{name} *{{stroke-linejoin:round;stroke-linecap:butt}}"
    root.attrib["class"] = name


def _bare(tag: str) -> str:
    return tag.rpartition("}")[2]


def _adapted(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    if key in ("style", "fill", "stroke"):
        value = _FONT.sub("var(--font)", value) if "font" in value else value
        value = _COLOUR.sub(lambda found: f"var(--{_NAMES[found[0].lower()]})", value)
    return _REFERENCE.sub(f"url(#{name}-", value)
