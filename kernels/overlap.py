"""Owns the checks that arguments keep apart: in memory, and by their offsets in a flat buffer.

What an op writes shares no memory with what it reads or writes besides: its programs run in any
order. Memory is looked at where there is some: not in a trace, of fake or of meta tensors.

    contiguous tensor    all bytes from its first to its last
    another              bytes with gaps, which may hold tensors that are apart from it even so
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes [start, end) that a tensor lies in; solid: it has all of them."""

    start: int
    end: int
    name: str
    tensor: torch.Tensor
    solid: bool

    def meets(self, other: _Span) -> bool:
        """Whether they share a byte; of two that have gaps, nobody knows, so no."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.solid:
            return _touches(other.tensor, self.start, self.end)
        return other.solid and _touches(self.tensor, other.start, other.end)


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
            if span.start < other.end and span.meets(other):
                _refuse(span.name, other.name)


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
        if not tensor.is_contiguous() and not _has_own_elements(tensor):
            raise ValueError(
                f"{name}[{index}]: expected memory of its own for every element, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}; pass a tensor that is not "
                "expanded"
            )
    named = ((f"{name}[{index}]", tensor) for index, tensor in enumerate(tensors))
    spans = [span for key, tensor in named if (span := _span(key, tensor))]
    solid = sorted((span for span in spans if span.solid), key=lambda span: span.start)
    for left, right in pairwise(solid):
        if right.start < left.end:
            _refuse(left.name, right.name)
    for gappy in spans:
        if not gappy.solid and (met := next(filter(gappy.meets, solid), None)):
            _refuse(gappy.name, met.name)


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


def _refuse(name: str, other: str) -> None:
    raise ValueError(
        f"{name}: expected memory apart from that of {other}, got an overlap; copy one of the two"
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


def _touches(tensor: torch.Tensor, start: int, end: int) -> bool:
    """Whether an element of the tensor has one of the bytes from `start` to `end`."""
    size = tensor.element_size()
    return _any_within(tensor.data_ptr(), _steps(tensor), size, start, end)


def _any_within(
    first: int, steps: Sequence[tuple[int, int]], size: int, start: int, end: int
) -> bool:
    """`_touches`, of the elements that `steps` lead to from byte `first`.

    Example: elements of 4 bytes, steps [(64, 8)], from byte 0, and the bytes from 70 to 120: the
    element at 0 ends before them, that at 64 too, and the one at 128 begins after them, so no.
    """
    if not steps:
        return first < end and first + size > start
    (step, count), *inner = steps
    if step == 0:
        return _any_within(first, inner, size, start, end)
    reach = _reach(inner, size)
    begin = max(0, (start - first - reach) // step + 1)
    stop = min(count, -(-(end - first) // step))
    return any(
        _any_within(first + index * step, inner, size, start, end) for index in range(begin, stop)
    )
