"""What the ranks of `bench network` saw, as rows and as a printed table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .network_worker import NetworkCase, RankSeen
from .timing import Estimate, estimate_median, pair_ratios
from .trainer_names import FSDP2

LEGEND = """\
sent      MB a step through the interface of the rank that sends most, headers included
counted   of it, what sidestream hands to collectives for others; B/param: bytes sent a parameter"""
_WIDTHS = (14, 25, 22, 9, 9, 8)


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """One trainer on one network. Seconds are a step's on the slowest rank, one for each round;
    bytes are a step's of the rank that sends most.

    over_fsdp2: round by round, None where FSDP2 was left out. counted_bytes: by the trainer's own
    count, None where it has none. loss: mean of the ranks in the last step.
    """

    trainer: str
    seconds: list[float]
    ms: Estimate
    over_fsdp2: Estimate | None
    sent_bytes: float
    counted_bytes: int | None
    bytes_a_parameter: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class NetworkResult:
    """All of one network. `link_bits_per_s`: what the slowest link carried before training."""

    bits_per_s: int
    ranks: int
    link_bits_per_s: float
    steps_of_each: int
    rows: list[NetworkRow]


def summarise(case: NetworkCase, seen: Sequence[RankSeen]) -> NetworkResult:
    """Rows in the order of the trainers, from what each rank saw."""
    seconds = {
        name: [max(of) for of in zip(*(each.trainers[name].seconds for each in seen), strict=True)]
        for name in case.trainers
    }
    return NetworkResult(
        bits_per_s=case.bits_per_s,
        ranks=len(seen),
        link_bits_per_s=min(each.link_bits_per_s for each in seen),
        steps_of_each=case.steps_of_each,
        rows=[_row(name, case, seen, seconds) for name in case.trainers],
    )


def _row(
    name: str, case: NetworkCase, seen: Sequence[RankSeen], seconds: Mapping[str, list[float]]
) -> NetworkRow:
    of_ranks = [each.trainers[name] for each in seen]
    sent = max(statistics.median(each.sent_bytes) for each in of_ranks)
    counted = [each.counted_bytes for each in of_ranks if each.counted_bytes is not None]
    ratio = None
    if FSDP2 in seconds:
        ratio = estimate_median(pair_ratios(seconds[name], seconds[FSDP2]))
    return NetworkRow(
        trainer=name,
        seconds=seconds[name],
        ms=estimate_median([each * 1e3 for each in seconds[name]]),
        over_fsdp2=ratio,
        sent_bytes=sent,
        counted_bytes=max(counted, default=None),
        bytes_a_parameter=sent / case.config.numel,
        loss=statistics.fmean(each.loss for each in of_ranks),
    )


def format_result(result: NetworkResult) -> Iterator[str]:
    """A heading, what the columns are, and a line a trainer."""
    yield (
        f"{describe_rate(result.bits_per_s)} each way, {result.ranks} ranks (before training the "
        f"slowest link carried {describe_rate(result.link_bits_per_s)})"
    )
    heads = ("trainer", "ms a step [95 %]", f"over {FSDP2} [95 %]", "sent MB", "counted", "B/param")
    yield _line((*heads, f"loss after {result.steps_of_each}"))
    for row in result.rows:
        yield _line(
            (
                row.trainer,
                row.ms.describe(digits=0),
                "-" if row.over_fsdp2 is None else row.over_fsdp2.describe(),
                f"{row.sent_bytes / 1e6:.2f}",
                "-" if row.counted_bytes is None else f"{row.counted_bytes / 1e6:.2f}",
                f"{row.bytes_a_parameter:.2f}",
                f"{row.loss:.4f}",
            )
        )


def describe_rate(bits_per_s: float) -> str:
    """In Mbit/s or Gbit/s."""
    if bits_per_s >= 1e9:
        return f"{bits_per_s / 1e9:.3g} Gbit/s"
    return f"{bits_per_s / 1e6:.4g} Mbit/s"


def _line(cells: Sequence[str]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=False)]
    return " ".join([*padded, cells[-1]])
