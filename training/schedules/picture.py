"""A schedule as a picture, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUFFIXES = (".png", ".svg", ".pdf")


def write_picture(path: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Draw every curve over `steps`, one above another, and write them by the suffix of `path`, one
    of `SUFFIXES`.
    """
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
