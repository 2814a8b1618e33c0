"""A schedule as a picture, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import OptionsError
from ..paths import require_writable_file

SUFFIXES = (".png", ".svg", ".pdf")


def require_picture(path: str, option: str) -> None:
    """Refuse what would keep a picture from being written.

    Raises:
        OptionsError: a name that says no format, a file that cannot be written, no matplotlib.
    """
    if Path(path).suffix not in SUFFIXES:
        raise OptionsError(
            f"expected {option} to end in one of {', '.join(SUFFIXES)}, got {path}; name the "
            "format, or leave the file out to draw in the terminal"
        )
    require_writable_file(path, option)
    if find_spec("matplotlib") is None:
        raise OptionsError(
            f"expected matplotlib for {option} {path}, got none; pip install 'sidestream[report]', "
            "or leave the file out to draw in the terminal"
        )


def write_picture(path: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Draw every curve over `steps`, one above another, and write them by the suffix of `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.2 * len(curves)), layout="constrained")
    axes = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
    for place, (name, values) in zip(axes, curves.items(), strict=True):
        place.plot(steps, values, drawstyle="steps-post" if name == "batch size" else "default")
        place.set_title(name, loc="left")
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path)
