"""Reads tensors and values of a checkpoint: checked first with what will read them, then in place.

A chunk is an archive as torch.save writes it. Where the sums of the files have been compared, its
elements go from the file straight into the tensor. A plain checkpoint of others has no sums: there
the checksums inside the archive are compared, and torch takes it apart.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from reprlib import repr as brief
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..storage import File
from ..tensor.chunks import CheckpointChunks
from .files import open_regular
from .stored import BadCheckpoint, Chunk, Ints, Key, KeyPath, Place, Stored, overlap

_ZIP = b"PK\x03\x04"
_ELEMENTS = "archive/data/0"  # torch.save's name for the first storage of what it writes
_LOCAL_HEADER_BYTES = 30
_NAME_AND_EXTRA = slice(26, 30)  # their lengths, two bytes each
_PIECE_BYTES = 1 << 20
_MAX_LIST = 1 << 20

T = TypeVar("T")


class Contents:
    """The files of `stored`, opened as they are needed and closed at the end of a `with`."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._files: dict[str, File] = {}
        self._first_bytes: dict[Place, int] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def values(self, keys: Iterable[Key]) -> dict[str, Any]:
        """Read `keys`, tensors whole and on the CPU, nested as they were saved.

        Raises:
            BadCheckpoint: a value is damaged, or holds objects of other than plain types.
            OSError: a file cannot be read.
        """
        found: dict[KeyPath, Any] = {}
        refused: list[Key] = []
        for key in keys:
            if key in self.stored.tensors:
                known = self.stored.tensors[key]
                value: Any = torch.empty(known.shape, dtype=known.dtype)
                self.require_sound({key: value})
                self.fill({key: value})
            else:
                try:
                    value = self._value(key, self.stored.values[key])
                except pickle.UnpicklingError:
                    refused.append(key)
                    continue
            found[self.stored.paths[key]] = value
        if refused:
            raise BadCheckpoint(
                "expected plain values, got objects that only unsafe unpickling could read under "
                f"{', '.join(refused)}"
            )
        return _nested(found)

    def require_sound(self, wanted: Mapping[Key, Tensor]) -> None:
        """Check all that `fill` would read.

        Raises:
            BadCheckpoint: something stored is damaged.
            OSError: a file cannot be read.
        """
        for key, tensor in wanted.items():
            dtype = self.stored.tensors[key].dtype
            needed = {chunk: None for chunk, *_ in self._parts(key, tensor)}
            for chunk in needed:
                if self.stored.digests is None:
                    self._decoded(key, chunk, dtype)
                else:
                    self._first_byte(key, chunk, dtype)

    def fill(self, wanted: Mapping[Key, Tensor]) -> None:
        """Fill tensors, sharded or plain, in place with this rank's part; dtypes are converted.

        Raises:
            BadCheckpoint: a file has changed since it was checked.
            OSError: a file cannot be read.
        """
        for key, tensor in wanted.items():
            dtype = self.stored.tensors[key].dtype
            if isinstance(tensor, CheckpointChunks):
                # Replicated parameters are gathered anew after a write, by all ranks: one that
                # holds no elements counts as a writer too.
                increment_version(tensor.local)
            for chunk, start, sizes, target in self._parts(key, tensor):
                strides = _strides(chunk.sizes)
                first = sum(a * b for a, b in zip(start, strides, strict=True))
                numel = 1 + sum((n - 1) * b for n, b in zip(sizes, strides, strict=True))
                if self.stored.digests is None:
                    flat = self._decoded(key, chunk, dtype).reshape(-1)[first : first + numel]
                else:
                    at = self._first_byte(key, chunk, dtype) + first * dtype.itemsize
                    is_dense = numel == math.prod(sizes) and target.is_contiguous()
                    if is_dense and target.is_cpu and target.dtype == dtype:
                        self._read(chunk.place.file, at, target.view(-1))
                        continue
                    flat = torch.empty(numel, dtype=dtype)
                    self._read(chunk.place.file, at, flat)
                target.copy_(flat.as_strided(sizes, strides))

    def _parts(self, key: Key, tensor: Tensor) -> Iterator[tuple[Chunk, Ints, Ints, Tensor]]:
        """Every chunk that this rank's part of `tensor` needs, what of it (start, sizes), and the
        view of the tensor that it fills.
        """
        for offsets, region in _regions(tensor):
            sizes = tuple(region.shape)
            for chunk in self.stored.tensors[key].chunks:
                shared = overlap(offsets, sizes, chunk.offsets, chunk.sizes)
                if shared is None:
                    continue
                target = region
                for dim, (start, size) in enumerate(zip(*shared, strict=True)):
                    target = target.narrow(dim, start - offsets[dim], size)
                yield chunk, _minus(shared[0], chunk.offsets), shared[1], target

    def _decoded(self, key: Key, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """The chunk as torch reads it."""
        content = self._content(key, chunk.place)
        found = _as_damage(key, chunk.place, lambda: _load(content))
        if (
            type(found) is not Tensor
            or tuple(found.shape) != chunk.sizes
            or found.dtype != dtype
            or found.layout != torch.strided
        ):
            raise _damage(key, chunk.place)
        return found

    def _value(self, key: Key, place: Place) -> Any:
        content = self._content(key, place)
        try:
            return _load(content)
        except pickle.UnpicklingError:
            raise
        except Exception as error:
            raise _damage(key, place) from error

    def _content(self, key: Key, place: Place) -> bytearray:
        """The archive at `place`."""
        if not place.num_bytes:
            raise _damage(key, place)
        content = bytearray(place.num_bytes)
        self._read(place.file, place.start, torch.frombuffer(content, dtype=torch.uint8))
        _as_damage(key, place, lambda: _require_stored(content, self.stored.digests is None))
        return content

    def _first_byte(self, key: Key, chunk: Chunk, dtype: torch.dtype) -> int:
        """Where in its file the elements of `chunk` begin, in row-major order."""
        if chunk.place in self._first_bytes:
            return self._first_bytes[chunk.place]
        window = io.BufferedReader(_Window(self._file(chunk.place.file), chunk.place))

        def find() -> int:
            with zipfile.ZipFile(window) as archive:
                entry = archive.getinfo(_ELEMENTS)
            window.seek(entry.header_offset)
            header = window.read(_LOCAL_HEADER_BYTES)
            lengths = header[_NAME_AND_EXTRA]
            begin = entry.header_offset + _LOCAL_HEADER_BYTES
            begin += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            is_plain = header.startswith(_ZIP) and entry.compress_type == zipfile.ZIP_STORED
            num_bytes = math.prod(chunk.sizes) * dtype.itemsize
            if not is_plain or entry.file_size != num_bytes:
                raise zipfile.BadZipFile
            if begin + num_bytes > chunk.place.num_bytes:
                raise zipfile.BadZipFile
            return chunk.place.start + begin

        first = self._first_bytes[chunk.place] = _as_damage(key, chunk.place, find)
        return first

    def _read(self, name: str, start: int, target: Tensor) -> None:
        """Fill the contiguous CPU tensor `target` with the bytes of a file from `start` on."""
        memory = memoryview(target.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        if rest := self._file(name).read_at(memory, start):
            raise BadCheckpoint(f"expected {len(rest)} more bytes of {name}, got its end")

    def _file(self, name: str) -> File:
        if name not in self._files:
            file = open_regular(self.stored.folder / name)
            self._files[name] = self._closing.enter_context(file)
        return self._files[name]


class _Window(io.RawIOBase):
    """The bytes of `file` at `place`, as a file."""

    def __init__(self, file: File, place: Place) -> None:
        self._file, self._place, self._position = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._place.num_bytes}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._place.num_bytes - self._position)
        wanted = memoryview(buffer)[:left]
        count = len(wanted) - len(self._file.read_at(wanted, self._place.start + self._position))
        self._position += count
        return count


def _regions(tensor: Tensor) -> Iterator[tuple[Ints, Tensor]]:
    """Every box of `tensor` that this rank holds: its offsets, and a view of its elements."""
    if isinstance(tensor, CheckpointChunks):
        yield from ((box.offsets, tensor.view_of(box)) for box in tensor.boxes())
        return
    if not hasattr(tensor, "__create_chunk_list__"):
        yield (0,) * tensor.dim(), tensor.detach()
        return
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for chunk in tensor.__create_chunk_list__():
        index = MetadataIndex("", chunk.offsets)
        shard: Tensor = tensor.__get_tensor_shard__(index)  # type: ignore[attr-defined]
        yield tuple(chunk.offsets), shard.detach()


def _load(content: bytearray) -> Any:
    """What torch.save wrote, if it can be read without running code."""
    if not content.startswith(_ZIP):  # older formats take other ways through torch.load
        raise zipfile.BadZipFile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has doubts about pickles that it then refuses
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _require_stored(content: bytearray, compares_checksums: bool) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            # What is compressed may be as large as it likes.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(content):
                raise zipfile.BadZipFile
            if compares_checksums and entry.CRC:  # 0: torch.save was told not to compute it
                with archive.open(entry) as file:
                    while file.read(_PIECE_BYTES):
                        pass


def _as_damage(key: Key, place: Place, read: Callable[[], T]) -> T:
    """`read()`; damaged bytes can make parsers raise anything."""
    try:
        return read()
    except OSError:
        raise
    except Exception as error:
        raise _damage(key, place) from error


def _damage(key: Key, place: Place) -> BadCheckpoint:
    return BadCheckpoint(f"expected '{key}' in {place.file} as it was written, got damaged bytes")


def _strides(sizes: Ints) -> Ints:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _minus(a: Ints, b: Ints) -> Ints:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Dicts (text parts) and lists (numbers) with each value at its path.

    Raises:
        BadCheckpoint: paths contradict each other.
    """
    tree: dict[str | int, Any] = {}
    for path, value in values.items():
        node: Any = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if isinstance(node, tuple):
                break
        if isinstance(node, tuple) or path[-1] in node:
            raise BadCheckpoint(f"expected one value at {brief(path)}, got another one as well")
        node[path[-1]] = (value,)
    built = _built(tree)
    return built if isinstance(built, dict) else {}


def _built(node: Any) -> Any:
    if isinstance(node, tuple):
        return node[0]
    kinds = {type(part) for part in node}
    if kinds == {int} and min(node) >= 0 and max(node) < _MAX_LIST:
        return [_built(node.get(part, (None,))) for part in range(max(node) + 1)]
    if kinds - {str}:
        raise BadCheckpoint(
            f"expected the names of a dict or the places of a list, got {brief([*node])}"
        )
    return {part: _built(below) for part, below in node.items()}
