"""The global batch size as a function of the samples consumed so far: phases of one size each.

    BatchSchedule.constant(64)                            64 from the first sample on
    BatchSchedule.ramp_up(16, 16, 1_000_000, final=64)    16, 32, 48 over a million samples, then 64
    BatchSchedule.parse("0:64 10M:128")                   64, and 128 behind ten million samples

A step belongs to the phase in which it begins, so a phase may be overrun by less than a step.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from ...sharding.arguments import require_count, require_kind

_SUFFIXES = MappingProxyType({"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)", re.ASCII | re.IGNORECASE)
_WORD = re.compile(r"[^\s,]+")
RAMP_NUMBERS = 3


class BatchPhase(NamedTuple):
    """`batch_size` samples a step, from when `first_sample` samples are consumed."""

    first_sample: int
    batch_size: int


class BegunPhase(NamedTuple):
    """Steps of `batch_size` samples from `step` on; those before consumed `consumed_samples`."""

    step: int
    consumed_samples: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The phases of a run, the first from sample 0 on; see the file's examples.

    Raises:
        ValueError: no phases, a first one that does not begin at 0, phases out of order.
        TypeError: something else than whole numbers.
    """

    phases: tuple[BatchPhase, ...]

    def __post_init__(self) -> None:
        if not all(isinstance(phase, BatchPhase) for phase in self.phases):
            raise TypeError(
                f"phases: expected BatchPhases, got {self.phases!r}; pass such as "
                "(BatchPhase(0, 64),), or call BatchSchedule.constant(64)"
            )
        for phase in self.phases:
            require_count("first_sample", phase.first_sample, 0)
            require_count("batch_size", phase.batch_size)
        firsts = [phase.first_sample for phase in self.phases]
        if firsts[:1] != [0] or any(b <= a for a, b in pairwise(firsts)):
            raise ValueError(
                "expected phases in their order, each later than the one before and the first at "
                f"sample 0, got {firsts}; name where each begins, once"
            )

    @classmethod
    def constant(cls, batch_size: int) -> BatchSchedule:
        """One size for the whole run."""
        return cls((BatchPhase(0, batch_size),))

    @classmethod
    def ramp_up(cls, start: int, increment: int, ramp_samples: int, *, final: int) -> BatchSchedule:
        """From `start` to `final` by `increment`, in phases of equal length that together take
        `ramp_samples`, as Megatron's `rampup_batch_size` does.

        Raises:
            ValueError, TypeError: sizes that are no counts, or that increments do not lead to.
        """
        require_count("start batch size", start)
        require_count("batch size increment", increment)
        require_count("ramp-up samples", ramp_samples, 0)
        require_count("final batch size", final)
        num_increments, rest = divmod(final - start, increment)
        if rest or num_increments < 0:
            nearest = (start,) if final < start else (final - rest, final - rest + increment)
            raise ValueError(
                f"expected a final batch size of {start} and increments of {increment}, got "
                f"{final}; take {' or '.join(map(str, nearest))}"
            )
        # Where phases are shorter than a sample the last of them counts.
        sizes = {
            -(-number * ramp_samples // max(num_increments, 1)): start + number * increment
            for number in range(num_increments + 1)
        }
        return cls(tuple(BatchPhase(*pair) for pair in sizes.items()))

    @classmethod
    def parse(cls, text: str, *, seq_length: int | None = None) -> BatchSchedule:
        """Read "THRESHOLD:SIZE THRESHOLD:SIZE ...", with spaces or commas between, in any order.

        Numbers may end in K, M, B or T (10^3 to 10^12). Thresholds count samples; with
        `seq_length` they count tokens, and are rounded down to whole samples of so many.

        Raises:
            ValueError: the text says something else; at which character, from 1, is told.
            TypeError: it is no text, or `seq_length` no count.
        """
        require_kind("text", text, str, "pass such as '0:64 10M:128'")
        if seq_length is not None:
            require_count("seq_length", seq_length)
        read = sorted(
            (threshold // (seq_length or 1), size, index)
            for threshold, size, index in _entries(text)
        )
        if not read:
            raise _unreadable(text, 0, "THRESHOLD:SIZE, such as 0:64")
        if read[0][0] != 0:
            raise _unreadable(text, read[0][2], "a first threshold of 0")
        for (before, *_), (threshold, _, index) in pairwise(read):
            if threshold == before:
                raise _unreadable(text, index, f"one threshold alone at sample {threshold}")
        return cls(tuple(BatchPhase(threshold, size) for threshold, size, _ in read))

    def at(self, consumed_samples: int) -> int:
        """The size of the step that begins when `consumed_samples` are consumed."""
        require_count("consumed_samples", consumed_samples, 0)
        index = bisect_right(self.phases, consumed_samples, key=lambda phase: phase.first_sample)
        return self.phases[index - 1].batch_size

    def consumed_before(self, step: int, *, multiple_of: int = 1) -> int:
        """How many samples the steps before `step`, counted from 1, have consumed: closed in each
        phase, so that a run resumes by its step alone.

        `multiple_of` rounds sizes down to its multiples, see `MicrobatchCalculator`; a run that
        has used other ones before has to keep its samples.

        Raises:
            ValueError, TypeError: `step` or `multiple_of` is no count; a size that is reached is
                less than `multiple_of`.
        """
        require_count("step", step)
        require_count("multiple_of", multiple_of)
        first_step, consumed, size = 1, 0, 0
        for begun in self.begun(multiple_of=multiple_of):
            if begun.step > step:
                break
            first_step, consumed, size = begun
            if first_step == step:  # whatever its size
                break
        return consumed + (step - first_step) * size

    def begun(self, *, multiple_of: int = 1) -> Iterator[BegunPhase]:
        """The phases in which a step begins; those that one step overruns are not among them.

        Raises:
            ValueError: as `consumed_before`, once a size that is too small is gone on from.
        """
        step, consumed = 1, 0
        ends = [phase.first_sample for phase in self.phases[1:]]
        for phase, end in zip(self.phases, [*ends, None], strict=True):
            if end is not None and end <= consumed:
                continue
            size = phase.batch_size // multiple_of * multiple_of
            yield BegunPhase(step, consumed, size)
            if size == 0:
                raise ValueError(
                    f"expected batch sizes of at least {multiple_of}, got {phase.batch_size} from "
                    f"sample {phase.first_sample} on; enlarge it, or use fewer ranks or smaller "
                    "microbatches"
                )
            if end is not None:
                num_steps = -(-(end - consumed) // size)
                step, consumed = step + num_steps, consumed + num_steps * size


def read_batch_schedule(
    text: str | None, final: int, *, seq_length: int | None = None
) -> BatchSchedule:
    """Return the schedule that `text` describes: "THRESHOLD:SIZE ...", see `BatchSchedule.parse`;
    "START INCREMENT SAMPLES", a ramp-up to `final`; None, `final` from the start.

    Raises:
        ValueError, TypeError: as `BatchSchedule.parse` and `BatchSchedule.ramp_up`.
    """
    if text is None:
        return BatchSchedule.constant(final)
    words = [(word.start(), word.end()) for word in _WORD.finditer(text)]
    if ":" in text or len(words) != RAMP_NUMBERS:
        return BatchSchedule.parse(text, seq_length=seq_length)
    start, increment, ramp = (_number(text, *word) for word in words)
    return BatchSchedule.ramp_up(start, increment, ramp // (seq_length or 1), final=final)


def _entries(text: str) -> Iterator[tuple[int, int, int]]:
    """Threshold and size of each word, and the index at which it begins."""
    for word in _WORD.finditer(text):
        colon = text.find(":", *word.span())
        threshold = _number(text, word.start(), word.end() if colon < 0 else colon)
        if colon < 0:
            raise _unreadable(text, word.end(), "':' and a batch size")
        size = _number(text, colon + 1, word.end())
        if size < 1:
            raise _unreadable(text, colon + 1, "a batch size of at least 1")
        yield threshold, size, word.start()


def _number(text: str, start: int, end: int) -> int:
    found = _NUMBER.match(text, start, end)
    if found is None:
        raise _unreadable(text, start, "a number such as 64 or 10M")
    if found.end() != end:
        raise _unreadable(text, found.end(), "one of K, M, B and T, or the number's end")
    number = Fraction(found[1]) * _SUFFIXES[found[2].upper()]
    if number.denominator != 1:
        raise _unreadable(text, start, "a whole number")
    return number.numerator


def _unreadable(text: str, index: int, expected: str) -> ValueError:
    got = repr(text[index:].split()[0]) if text[index:].strip() else "the end"
    return ValueError(
        f"expected {expected} at character {index + 1} of {text!r}, got {got}; write such as "
        "'0:64 10M:128'"
    )
