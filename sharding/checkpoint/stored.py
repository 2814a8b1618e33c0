"""What a checkpoint holds: its tensors in chunks and its values, each at a place in a file.

Whatever the index is that this was read from, it is checked here: every file is in the folder, no
byte belongs to two things, and the chunks of a tensor cover it without gaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from reprlib import repr as brief

import torch

from ..storage import Location

SEGMENT_BYTES = 64 << 20
_NOT_PLAIN = ("torch.quint", "torch.qint", "torch.bits")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(_NOT_PLAIN)
}

Key = str
KeyPath = tuple[str | int, ...]
Ints = tuple[int, ...]

_MAX_COUNT = 2**63 - 1
_MAX_DEPTH = 100  # of the nested state dict
_MAX_NAME = 255  # of a file
_MAX_PAIRS = 1 << 22  # of chunks to compare; ranks' intervals and slices need a few for each


class BadCheckpoint(ValueError):
    """What is stored contradicts itself, or is not what a checkpoint holds; says what and where."""


@dataclass(frozen=True, slots=True)
class Place:
    """`num_bytes` bytes of `file`, a name in the checkpoint's folder, from byte `start` on."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a tensor from `offsets` on, of `sizes`; `place` is its archive."""

    offsets: Ints
    sizes: Ints
    place: Place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of `shape`, cut into `chunks`."""

    shape: Ints
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Digest:
    """Size of a file, and the CRC-32 of each `SEGMENT_BYTES` of it, the last of what is left.

    Segments are what ranks and threads share. (SHA-256 takes three times as long, and whoever could
    forge the one could write the other anew.)
    """

    num_bytes: int
    crc32s: Ints


@dataclass(frozen=True, slots=True)
class Stored:
    """The checkpoint in `folder`. `paths` says where each key stands in the nested state dict that
    was saved; `fingerprint` tells this checkpoint from others; `digests` are those of its files,
    None where a plain torch.distributed.checkpoint holds none.

    Raises:
        BadCheckpoint: the parts contradict each other.
    """

    folder: Location
    fingerprint: str
    tensors: Mapping[Key, StoredTensor]
    values: Mapping[Key, Place]
    paths: Mapping[Key, KeyPath]
    digests: Mapping[str, Digest] | None

    def __post_init__(self) -> None:
        for key, path in self.paths.items():
            if len(path) > _MAX_DEPTH or ".".join(map(str, path)) != key:
                raise BadCheckpoint(f"{brief(key)}: expected its path, got {brief(path)}")
        for key, tensor in self.tensors.items():
            _require_cover(key, tensor)
        _require_apart(self.places())
        if self.digests is not None:
            _require_inside(self.places(), self.digests)

    def keys_under(self, *prefix: str | int) -> list[Key]:
        """The keys whose path begins with `prefix`."""
        return [key for key, path in self.paths.items() if path[: len(prefix)] == prefix]

    def shape_of(self, key: Key) -> torch.Size | None:
        """The shape of the tensor stored under `key`, None if that is no tensor."""
        return torch.Size(self.tensors[key].shape) if key in self.tensors else None

    def places(self) -> Iterator[tuple[Key, Place]]:
        """Every place, with the key that it belongs to."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk.place
        yield from self.values.items()


def counts(values: object) -> Ints:
    """`values`, if they are numbers of something.

    Raises:
        BadCheckpoint: they are not.
    """
    if not isinstance(values, (list, tuple)) or not all(
        type(value) is int and 0 <= value <= _MAX_COUNT for value in values
    ):
        raise BadCheckpoint(f"expected counts, got {brief(values)}")
    return tuple(values)


def key_path(parts: object) -> KeyPath:
    """`parts`, if they can be the path of a key.

    Raises:
        BadCheckpoint: they cannot.
    """
    if not isinstance(parts, (list, tuple)) or any(type(part) not in (str, int) for part in parts):
        raise BadCheckpoint(f"expected the path of a key, got {brief(parts)}")
    return tuple(parts)


def require_plain_name(file: object) -> str:
    """`file`, if it names something in the checkpoint's own folder.

    Raises:
        BadCheckpoint: it leads elsewhere, or is no name.
    """
    if not isinstance(file, str) or not file.isprintable() or not 0 < len(file) <= _MAX_NAME:
        raise BadCheckpoint(f"expected the name of a file, got {brief(file)}")
    if file in (".", "..") or PurePosixPath(file).name != file or "\\" in file:
        raise BadCheckpoint(f"expected a file in the checkpoint's own folder, got {file!r}")
    return file


def _require_cover(key: Key, tensor: StoredTensor) -> None:
    shape, chunks = tensor.shape, tensor.chunks
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape) or not all(
            start >= 0 and size >= 0 and start + size <= whole
            for start, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise BadCheckpoint(
                f"'{key}': expected chunks inside its shape {shape}, got one of {chunk.sizes} at "
                f"{chunk.offsets}"
            )
        num_bytes = math.prod(chunk.sizes) * tensor.dtype.itemsize
        if num_bytes > chunk.place.num_bytes:  # archives do not compress
            raise BadCheckpoint(
                f"'{key}': expected at least {num_bytes} bytes for a chunk of {chunk.sizes}, got "
                f"{chunk.place.num_bytes}"
            )
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    stored_numel = sum(math.prod(chunk.sizes) for chunk in filled)
    if stored_numel != math.prod(shape) or any(_overlaps(filled)) or not chunks:
        raise BadCheckpoint(
            f"'{key}': expected chunks that cover its shape {shape} once, got {stored_numel} "
            f"elements in {len(chunks)} chunks"
        )


def _overlaps(chunks: list[Chunk]) -> Iterator[bool]:
    """True for each two chunks that share an element."""
    if not chunks or not chunks[0].offsets:
        yield from [True] * (len(chunks) - 1)
        return
    # Ranks hold intervals or slices of one dimension: few chunks meet in the one they start apart.
    starts = [{chunk.offsets[dim] for chunk in chunks} for dim in range(len(chunks[0].offsets))]
    dim = max(range(len(starts)), key=lambda dim: len(starts[dim]))
    ordered = sorted(chunks, key=lambda chunk: chunk.offsets[dim])
    num_pairs = 0
    for position, first in enumerate(ordered):
        end = first.offsets[dim] + first.sizes[dim]
        for second in ordered[position + 1 :]:
            if second.offsets[dim] >= end:
                break
            num_pairs += 1
            if num_pairs > _MAX_PAIRS:
                raise BadCheckpoint(f"expected chunks that lie in order, got {len(chunks)} in none")
            yield overlap(first.offsets, first.sizes, second.offsets, second.sizes) is not None


def overlap(
    offsets: Ints, sizes: Ints, other_offsets: Ints, other_sizes: Ints
) -> tuple[Ints, Ints] | None:
    """Offsets and sizes of what two boxes share, None without an element."""
    start = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    end = (
        min(a + m, b + n)
        for a, m, b, n in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    )
    shared = tuple(b - a for a, b in zip(start, end, strict=True))
    return (start, shared) if all(size > 0 for size in shared) else None


def _require_apart(places: Iterable[tuple[Key, Place]]) -> None:
    ordered = sorted(places, key=lambda item: (item[1].file, item[1].start))
    for (key, place), (other, following) in itertools.pairwise(ordered):
        if place.file == following.file and place.start + place.num_bytes > following.start:
            raise BadCheckpoint(
                f"expected bytes of '{key}' and '{other}' apart, got both at byte "
                f"{following.start} of {place.file}"
            )


def _require_inside(places: Iterable[tuple[Key, Place]], digests: Mapping[str, Digest]) -> None:
    for key, place in places:
        known = digests.get(place.file)
        if known is None or place.start + place.num_bytes > known.num_bytes:
            size = "no such file" if known is None else f"one of {known.num_bytes} bytes"
            raise BadCheckpoint(
                f"'{key}': expected bytes {place.start} to {place.start + place.num_bytes} of "
                f"{place.file}, got {size}"
            )
