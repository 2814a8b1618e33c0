"""The page of `sidestream bench convergence`: what the results say, as a table and as curves.

    rows_of      results -> a row for each wire: bytes, final losses, gap to the baseline
    curves_of    results -> a picture: the whole training, and its last quarter
    page_of      results -> the page that shows both

Everything here is pure; the same results make the same bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .convergence import Result
from .convergence_wires import BASELINE, WIRES
from .curves import Line, Panel, as_svg

PAGE_NAME, CURVES_NAME = "convergence.md", "curves.svg"
_LAST_PART = 0.25
# The window on the last part ends so far above the baseline: what is worse would hide the rest.
_ROOM_ABOVE = 0.05
_MARGIN = 0.03
_PERCENT_DIGITS = 2
_REPEATED = {
    True: "the same losses, and the same bits in all weights at the end.",
    False: "**other bits, so what is said here of wires may be chance.**",
    None: "not yet.",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the seeds' values."""

    mean: float
    low: float
    high: float

    def text(self, digits: int, sign: str = "") -> str:
        """Mean [low, high]."""
        mean, low, high = (f"{x:{sign}.{digits}f}" for x in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class Row:
    """One wire. gradients, weights: how they travel, and bytes an element. gap_percent: of the
    final validation loss over the baseline's, seed by seed; None where no seed has both. `broken`:
    seeds whose loss was not finite.
    """

    wire: str
    gradients: str
    weights: str
    seeds: int
    broken: int
    final: Spread | None
    gap_percent: Spread | None
    seconds: float

    @property
    def limit_percent(self) -> float | None:
        """What the mean gap is to be at most."""
        return WIRES[self.wire].limit_percent

    @property
    def verdict(self) -> str:
        """Whether it is."""
        if self.limit_percent is None:
            return ""
        is_held = (
            not self.broken
            and self.gap_percent is not None
            and round(self.gap_percent.mean, _PERCENT_DIGITS) <= self.limit_percent
        )
        return f"{self.limit_percent:g}: {'held' if is_held else 'missed'}"


def spread_of(values: Sequence[float]) -> Spread | None:
    """None of no values."""
    if not values:
        return None
    return Spread(statistics.fmean(values), min(values), max(values))


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row for each wire that there are results of, in the order of WIRES."""
    first = [result for result in results if not result.attempt]
    baseline = {
        result.seed: result.final_validation_loss for result in first if result.wire == BASELINE
    }
    return [
        _row(wire, of_wire, baseline)
        for wire in WIRES
        if (of_wire := [result for result in first if result.wire == wire])
    ]


def _row(wire: str, results: Sequence[Result], baseline: dict[int, float | None]) -> Row:
    finals = {
        result.seed: result.final_validation_loss
        for result in results
        if result.final_validation_loss is not None
    }
    gaps = [
        100.0 * (final / exact - 1.0)
        for seed, final in finals.items()
        if (exact := baseline.get(seed)) is not None
    ]
    return Row(
        wire=wire,
        gradients=_sent(results[0].wire_settings["gradients"], results[0].grad_bytes),
        weights=_sent(results[0].wire_settings["weights"], results[0].weight_bytes),
        seeds=len(results),
        broken=len(results) - len(finals),
        final=spread_of(list(finals.values())),
        gap_percent=spread_of(gaps),
        seconds=statistics.median(result.seconds for result in results),
    )


def _sent(how: str, num_bytes: float | None) -> str:
    return f"{how}: {'-' if num_bytes is None else f'{num_bytes:.3f}'}"


def lines_of(results: Sequence[Result]) -> list[Line]:
    """Validation loss by step: mean of the seeds, from their lowest to their highest, as far as it
    is finite with all.
    """
    lines = []
    for style, wire in enumerate(WIRES):
        curves = [
            dict(map(tuple, result.validation))
            for result in results
            if result.wire == wire and not result.attempt
        ]
        if not curves:
            continue
        points = []
        for step in curves[0]:
            losses = [curve.get(step) for curve in curves]
            finite = [loss for loss in losses if loss is not None]
            if len(finite) == len(losses):
                points.append((step, min(finite), statistics.fmean(finite), max(finite)))
        lines.append(Line(wire, points, style))
    return lines


def curves_of(results: Sequence[Result]) -> str:
    """The picture, an SVG."""
    lines = lines_of(results)
    steps = results[0].settings["steps"]
    whole, last = (0.0, float(steps)), (steps * (1.0 - _LAST_PART), float(steps))
    panels = [
        Panel("validation loss", "step", "nats a byte", whole, _window(lines, whole)),
        Panel("the last quarter", "step", "nats a byte", last, _window(lines, last, _ROOM_ABOVE)),
    ]
    return as_svg(panels, lines)


def _window(
    lines: Sequence[Line], x: tuple[float, float], room_above: float | None = None
) -> tuple[float, float]:
    """From the lowest point of all lines to the highest, or to `room_above` of the baseline's."""
    points = {
        line.name: [point for point in line.points if x[0] <= point[0] <= x[1]] for line in lines
    }
    every = [point for found in points.values() for point in found]
    if not every:
        return 0.0, 1.0
    low, high = min(point[1] for point in every), max(point[3] for point in every)
    if room_above is not None and (exact := points.get(BASELINE)):
        high = min(high, (1.0 + room_above) * max(point[3] for point in exact))
    margin = _MARGIN * (high - low) or _MARGIN
    return low - margin, high + margin


def page_of(results: Sequence[Result], *, left_out: int = 0) -> str:
    """The page, Markdown beside the picture, of results with the same settings; beside them,
    `left_out` of others.
    """
    rows = rows_of(results)
    notes = _notes(results, rows)
    if left_out:
        notes.append(f"Left out: {left_out} results of other settings.")
    return "\n".join(
        [
            "# The loss by wire",
            "",
            *_introduction(results),
            "",
            f"![validation loss by step]({CURVES_NAME})",
            "",
            "Lines are means of the seeds, bands go from the lowest seed to the highest. "
            f"The second window ends {_ROOM_ABOVE:.0%} above {BASELINE}.",
            "",
            *table_of(rows),
            "",
            *(f"- {note}" for note in notes),
            "",
        ]
    )


def _introduction(results: Sequence[Result]) -> list[str]:
    result = results[0]
    settings, model = result.settings, result.settings["model"]
    rows, context = settings["rows"], model["context"]
    return [
        f"The same GPT trained with each wire: {result.num_parameters:,} parameters "
        f"(layers: {model['num_layers']}, width: {model['width']}), {settings['steps']:,} steps on "
        f"{settings['ranks']} ranks, {rows} sequences of {context} bytes a rank, all else FP32 "
        f"(AdamW, warm-up and cosine from {settings['learning_rate']:g}, gradients clipped at "
        f"{settings['clip_norm']:g}). Initial weights and the order of the data follow from the "
        "seed, so wires alone differ.",
        "",
        f"The text (SHA-256 {settings['data_sha256']:.12}) is cut into what is trained on and 5 % "
        f"held out, of which {settings['validation_rows'] * settings['ranks']} sequences give the "
        "validation loss. The final one is the mean of those in the last 100 steps. A model of how "
        f"often each byte comes would have {result.unigram_loss:.3f}.",
        "",
        *(f"    {command}" for command in _each(one.command for one in results)),
        "",
        *_each(_machine(one) for one in results),
    ]


def _machine(result: Result) -> str:
    found = result.machine
    return (
        f"Measured on {found['device']}, {found['cores']} cores, one thread a rank, gloo; Python "
        f"{found['python']}, torch {found['torch']}, commit {found['commit']}."
    )


def _each(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def table_of(rows: Sequence[Row]) -> list[str]:
    """The table's lines, in Markdown."""
    head = (
        "wire", "gradients: bytes an element", "weights: bytes an element", "final validation loss",
        f"% above {BASELINE}", "at most", "not finite", "seeds", "seconds a run",
    )  # fmt: skip
    cells = [head, ("---",) * len(head), *(_cells(row) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in cells]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.wire,
        row.gradients,
        row.weights,
        "-" if row.final is None else row.final.text(4),
        "-" if row.gap_percent is None else row.gap_percent.text(_PERCENT_DIGITS, "+"),
        row.verdict,
        f"{row.broken} of {row.seeds}" if row.broken else "never",
        f"{row.seeds}",
        f"{row.seconds:.0f}",
    )


def _notes(results: Sequence[Result], rows: Sequence[Row]) -> list[str]:
    notes = [
        f"% above {BASELINE}: seed by seed, then mean [lowest, highest]. Bytes are those of the "
        "collectives' arguments in one step, headers and padding included.",
        "fp32-nudged starts from weights that were rounded to bfloat16 once: what is no farther "
        f"from {BASELINE} than it is may be chance.",
        f"{BASELINE} trained twice: {_REPEATED[is_repeated(results)]}",
    ]
    if len({row.seeds for row in rows}) > 1:
        notes.append("Not all is done: some wires have fewer seeds than others.")
    return notes


def is_repeated(results: Sequence[Result]) -> bool | None:
    """Whether what was trained twice has the same bits each time; None where nothing was."""
    runs: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        runs.setdefault((result.wire, result.seed), []).append(result)
    twice = [found for found in runs.values() if len(found) > 1]
    if not twice:
        return None
    return all(
        (again.weights_sha256, again.losses) == (first.weights_sha256, first.losses)
        for first, *others in twice
        for again in others
    )
