"""Checks that arguments keep apart: in memory, and by their offsets in a flat buffer.

What an op writes shares no memory with what it reads or writes besides: its programs run in any
order. Memory is looked at where there is some: not in a trace, of fake or of meta tensors.

    contiguous tensor    all bytes from its first to its last
    another              bytes with gaps, which may hold tensors that are apart from it even so
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_MAX_LOOKS = 2**14  # at a choice of indices, some 2 us each; strides that nest need a few


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes [start, end) that a tensor lies in; solid: it has all of them."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor
    solid: bool

    def meets(self, other: _Span) -> bool | None:
        """Whether they share a byte; `None` where that would take too long to find out."""
        if self.start >= other.end or other.start >= self.end:
            return False
        steps, size = self._parts()
        other_steps, other_size = other._parts()
        apart = other.start - self.start
        return _reaches(_ranges(steps, other_steps), apart - size + 1, apart + other_size - 1)

    def _parts(self) -> tuple[list[tuple[int, int]], int]:
        """The steps to its parts, and the bytes of each: one part where it is solid."""
        if self.solid:
            return [], self.end - self.start
        return _steps(self.tensor), self.tensor.element_size()


def check_apart(
    written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise `ValueError` where a tensor of `written` shares memory with any other one."""
    if torch.compiler.is_compiling():
        return
    spans = [span for name, tensor in written.items() if (span := _span(name, tensor))]
    others = [span for name, tensor in read.items() if (span := _span(name, tensor))]
    for index, span in enumerate(spans):
        for other in chain(spans[index + 1 :], others):
            _check_pair(span, other)


def are_sources(
    written: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    dtypes: Collection[torch.dtype],
    also_written: torch.Tensor | None = None,
) -> bool:
    """Whether all tensors may be read while the others are written: the usual case, quickly.

    They lie on the device of `written`, have one of `dtypes` and memory apart from what is written,
    which is contiguous. Where that is not plain, as without memory, the answer is no or an error.
    """
    device = written.device
    given = (written,) if also_written is None else (written, also_written)
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in given]
    for tensor in tensors:
        if (
            type(tensor) not in PLAIN_TYPES
            or tensor.dtype not in dtypes
            or tensor.device != device
            or tensor.is_nested
            or tensor.is_neg()
            or not (start := tensor.data_ptr())
        ):
            return False
        stop = start + tensor.nbytes  # of one with gaps it may be more
        for begin, end in places:
            if start < end and (stop > begin or not tensor.is_contiguous()):
                return False
    return True


def check_destinations(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` where elements of the tensors, of one or of two, share memory."""
    if torch.compiler.is_compiling() or _are_known_apart(tensors):
        return
    for index, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            _check_own_elements(f"{name}[{index}]", tensor)
    named = ((f"{name}[{index}]", tensor) for index, tensor in enumerate(tensors))
    spans = [span for key, tensor in named if (span := _span(key, tensor))]
    spans.sort(key=lambda span: span.start)
    for index, span in enumerate(spans):
        for place in range(index + 1, len(spans)):
            if spans[place].start >= span.end:
                break
            _check_pair(span, spans[place])


def check_disjoint(numels: Sequence[int], offsets: Sequence[int]) -> None:
    """Raise `ValueError` unless tensors of `numels` elements at `offsets` keep apart."""
    filled = [(offsets[i], offsets[i] + numel, i) for i, numel in enumerate(numels) if numel]
    for (_, end, left), (start, _, right) in pairwise(_in_order(filled)):
        if start < end:
            raise ValueError(
                f"offsets[{right}]: expected {end} or more, where tensors[{left}] ends, got "
                f"{start}; give every tensor its own interval"
            )


def _in_order(intervals: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The intervals, sorted by where they start."""
    if not torch.compiler.is_compiling():
        return sorted(intervals)
    ordered: list[tuple[int, int, int]] = []
    for interval in intervals:  # sizes may be symbols, which can be compared but not sorted by
        place = len(ordered)
        while place and ordered[place - 1][0] > interval[0]:
            place -= 1
        ordered.insert(place, interval)
    return ordered


def _check_pair(span: _Span, other: _Span) -> None:
    met = span.meets(other)
    if met is None:
        strides = f"{span.tensor.stride()} and {other.tensor.stride()}"
        raise ValueError(
            f"{span.name}: expected memory apart from that of {other.name}, got strides {strides}, "
            "of which that cannot be told; pass contiguous tensors"
        )
    if met:
        raise ValueError(
            f"{span.name}: expected memory apart from that of {other.name}, got an overlap; copy "
            "one of the two"
        )


def _check_own_elements(name: str, tensor: torch.Tensor) -> None:
    own = _has_own_elements(tensor) or _are_all_apart(tensor)
    if not own:
        doubt = "" if own is False else ", of which that cannot be told"
        raise ValueError(
            f"{name}: expected memory of its own for every element, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}{doubt}; pass a contiguous tensor"
        )


def _span(name: str, tensor: torch.Tensor | None) -> _Span | None:
    """Where a tensor lies, `None` where it has no elements or no memory that we can see."""
    if tensor is None or type(tensor) not in PLAIN_TYPES or tensor.is_meta or not tensor.numel():
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # inside a transform of torch.func
        return None
    if start == 0:
        return None
    if tensor.is_contiguous():
        return _Span(start, start + tensor.nbytes, name, tensor, solid=True)
    num_bytes = _reach(_steps(tensor), tensor.element_size())
    solid = num_bytes == tensor.nbytes and _has_own_elements(tensor)
    return _Span(start, start + num_bytes, name, tensor, solid)


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(bytes from an element to the next, elements) of the dimensions, the longest step first."""
    size = tensor.element_size()
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(((stride * size, count) for stride, count in dims if count > 1), reverse=True)


def _reach(steps: Sequence[tuple[int, int]], element_size: int) -> int:
    """Bytes from the first element to the end of the last."""
    return element_size + sum(step * (count - 1) for step, count in steps)


def _are_known_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are contiguous and none begins before another ends: the usual case, quickly."""
    places = []
    try:
        for tensor in tensors:
            if type(tensor) not in PLAIN_TYPES or not tensor.is_contiguous():
                return False
            places.append((tensor.data_ptr(), tensor.nbytes))
    except RuntimeError:  # there is no memory
        return False
    places.sort()
    return all(start + size <= following for (start, size), (following, _) in pairwise(places))


def _has_own_elements(tensor: torch.Tensor) -> bool:
    """Whether every step leads past all that shorter steps reach: then no two elements meet."""
    steps, size = _steps(tensor), tensor.element_size()
    return all(step >= _reach(steps[index + 1 :], size) for index, (step, _) in enumerate(steps))


def _are_all_apart(tensor: torch.Tensor) -> bool | None:
    """`_has_own_elements` of any strides; `None` where that would take too long to find out.

    Of two elements that meet, take the first index that differs: it is larger in one of them.
    """
    steps, most = _steps(tensor), tensor.element_size() - 1
    if any(step == 0 for step, _ in steps):
        return False
    for index, (step, count) in enumerate(steps):
        inner = _ranges(steps[index + 1 :], steps[index + 1 :])
        met = _reaches([(step, 1, count - 1), *inner], -most, most)
        if met is not False:
            return None if met is None else False
    return True


def _ranges(
    steps: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(step, least, most times) to go from any part of one tensor to any of another, longest first.

    Up along `steps`, down along `others`; what both have is one, so that nested strides leave two
    choices a step at most.
    """
    found: dict[int, tuple[int, int]] = {}
    for step, up, down in chain(
        ((step, count - 1, 0) for step, count in steps),
        ((step, 0, count - 1) for step, count in others),
    ):
        if step:
            least, most = found.get(step, (0, 0))
            found[step] = least - down, most + up
    return sorted(((step, *times) for step, times in found.items()), reverse=True)


def _reaches(ranges: Sequence[tuple[int, int, int]], low: int, high: int) -> bool | None:
    """Whether steps, each as often as its range allows, lead to somewhere from `low` to `high`.

    `None` after too many looks. Example: ranges [(64, 0, 8), (4, 0, 3)], from 20 to 60: no step of
    64 leads to 12 at most, and one to 64 at least, so no.
    """
    rests = [(0, 0, 0)]  # (divisor, least, most) of all that shorter steps lead to
    for step, fewest, most in reversed(ranges):
        divisor, least, largest = rests[-1]
        rests.append((math.gcd(divisor, step), least + step * fewest, largest + step * most))
    rests.reverse()
    pending = [(0, low, high)]
    for _ in range(_MAX_LOOKS):
        if not pending:
            return False
        level, low, high = pending.pop()
        divisor, least, most = rests[level]
        low, high = max(low, least), min(high, most)
        if low > high or (divisor and -(-low // divisor) * divisor > high):
            continue
        if level == len(ranges):
            return True
        step, fewest, largest = ranges[level]
        _, least, most = rests[level + 1]
        first = max(fewest, -((most - low) // step))
        last = min(largest, (high - least) // step, first + _MAX_LOOKS)
        pending.extend(
            (level + 1, low - times * step, high - times * step) for times in range(first, last + 1)
        )
    return None
