"""Opens the safetensors files of a model, one or several with an index, and reads from them.

Files stay open from the check of their headers to the last read, so that what was checked is what
is read, whoever replaces the files meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..arguments import kind_of
from ..storage import is_url
from ..untrusted import open_regular, read_at, shown
from .format import (
    INDEX,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SINGLE,
    FileTensor,
    header_length,
    parse_header,
    parse_index,
)

CHUNK_BYTES = 4 * 2**20
"""How much is read, gathered or written at once."""


_SAMPLES = 16
_SAMPLE_BYTES = 4096
_INDEX_ENDING = ".safetensors.index.json"


class Staging:
    """`CHUNK_BYTES` of plain memory, seen as bytes and as elements."""

    def __init__(self) -> None:
        self._memory = bytearray(CHUNK_BYTES)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def pieces(self, start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Elements [start, stop) of `dtype` in pieces that fit: where each starts, its length."""
        most = len(self._memory) // dtype.itemsize
        for first in range(start, stop, most):
            yield first, min(most, stop - first)

    def first(self, nbytes: int) -> memoryview:
        """The first `nbytes`."""
        return memoryview(self._memory)[:nbytes]

    def elements(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The same bytes as a tensor [numel] of `dtype`."""
        return self._tensor[: numel * dtype.itemsize].view(dtype)


class OpenFile:
    """A regular file, open to read; `size` in bytes."""

    def __init__(self, path: Path) -> None:
        """Open `path`.

        Raises:
            FileNotFoundError: there is nothing.
            OSError: it cannot be opened.
            ValueError: it is no regular file (a link to one is fine).
        """
        self.path = path
        self._file = open_regular(path)
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def close(self) -> None:
        """Give the file back to the system."""
        self._file.close()

    def read_into(self, memory: memoryview, position: int) -> None:
        """Fill `memory` from byte `position` on.

        Raises:
            OSError: the file ends before, or cannot be read.
        """
        if rest := read_at(self._file, memory, position):
            end = position + len(memory) - len(rest)
            raise OSError(f"{shown(self.path)}: ends at byte {end}, cut since it was opened")

    def read(self, position: int, nbytes: int) -> bytes:
        """`nbytes` from byte `position` on; raises as `read_into` does."""
        memory = bytearray(nbytes)
        self.read_into(memoryview(memory), position)
        return bytes(memory)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a stored tensor lies."""

    file: OpenFile
    stored: FileTensor

    def read(self, staging: Staging, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel), in `staging`, as the file has them; raises OSError."""
        dtype = self.stored.dtype
        nbytes = numel * dtype.itemsize
        position = self.stored.start + start * dtype.itemsize
        self.file.read_into(staging.first(nbytes), position)
        return staging.elements(numel, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """The tensors in the files of a model.

    `fingerprint` is one of the index, of all headers and of samples of the tensors: ranks that read
    files of the same names and shapes from different disks have the same if these are copies.
    """

    place: Path
    sources: dict[str, Source]
    fingerprint: str


def open_model(path: str | os.PathLike[str], files: contextlib.ExitStack) -> StoredModel:
    """Open a file, the files of an index, or those of a folder; they are closed with `files`.

    A folder that has both a single file and an index counts by the first, as for transformers.

    Raises:
        FileNotFoundError: there is none, or not all that the index names.
        OSError: one cannot be read.
        TypeError: `path` is no path.
        ValueError: a header or the index is damaged, or they do not fit each other.
    """
    place = _place_of(path)
    if place.name.endswith(_INDEX_ENDING):
        return _open_sharded(place, files)
    if not place.is_dir():
        return _open_single(place, files)
    if (place / SINGLE).exists() or not (place / INDEX).exists():
        return _open_single(place / SINGLE, files)
    return _open_sharded(place / INDEX, files)


def _place_of(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected text or a pathlib.Path, got {kind_of(path)}")
    if "\0" in os.fspath(path):
        raise ValueError(f"path: expected that of a file or folder, got {path!r}")
    # Links stay: in a cache of the Hugging Face hub a file's real name is its hash.
    if is_url(path):
        raise ValueError(
            f"path: expected the path of a file or folder, got the URL {path!r}; copy it here, or "
            "use load_checkpoint, which takes URLs"
        )
    place = Path(os.path.abspath(Path(path).expanduser()))
    if place.exists():
        return place
    raise FileNotFoundError(
        f"path: expected a safetensors file, or a folder with {SINGLE} or {INDEX}, got "
        f"{shown(place)}, where there is nothing; give the path of the export"
    )


def _open_single(path: Path, files: contextlib.ExitStack) -> StoredModel:
    file = _open(path, files)
    tensors, digest = _read_header(file)
    sources = {name: Source(file, stored) for name, stored in tensors.items()}
    return StoredModel(path, sources, _combined([digest]))


def _open_sharded(path: Path, files: contextlib.ExitStack) -> StoredModel:
    index = _open(path, files)
    content, weight_map = read_index(index)
    sources: dict[str, Source] = {}
    digests = [content]
    for name in sorted(set(weight_map.values())):
        file = _open(path.parent / name, files)
        tensors, digest = _read_header(file)
        digests += [name.encode(), digest]
        for tensor, stored in tensors.items():
            if weight_map.get(tensor) != name:
                raise _damaged(
                    path,
                    f"expected '{shown(tensor)}' in {shown(weight_map.get(tensor, 'no file'))}, "
                    f"got one in {shown(name)}",
                )
            sources[tensor] = Source(file, stored)
    if lacking := sorted(weight_map.keys() - sources.keys()):
        raise _damaged(
            path,
            f"expected '{shown(lacking[0])}' in {shown(weight_map[lacking[0]])}, got a file "
            "without it",
        )
    with contextlib.closing(OpenFile(path)) as again:
        if again.identity != index.identity:
            raise _damaged(path, "expected files that stay, got an index that was replaced")
    return StoredModel(path, sources, _combined(digests))


def read_index(index: OpenFile) -> tuple[bytes, dict[str, str]]:
    """The content of an index, and the file of every tensor.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    if index.size > MAX_HEADER_BYTES:
        raise _damaged(index.path, f"expected at most {MAX_HEADER_BYTES} bytes, got {index.size}")
    content = index.read(0, index.size)
    try:
        return content, parse_index(content)
    except ValueError as error:
        raise _damaged(index.path, str(error)) from error


def _open(path: Path, files: contextlib.ExitStack) -> OpenFile:
    try:
        file = OpenFile(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"path: expected {shown(path.name)} in {shown(path.parent)}, got a folder without it; "
            f"give the path of a whole export (a single file, {SINGLE}, or {INDEX} with all files "
            "that it names)"
        ) from error
    files.callback(file.close)
    return file


def _read_header(file: OpenFile) -> tuple[dict[str, FileTensor], bytes]:
    """The tensors of a file, and a digest of its header, its size and samples of the rest."""
    try:
        first = file.read(0, min(LENGTH_BYTES, file.size))
        header = file.read(LENGTH_BYTES, header_length(first, file.size))
        tensors = parse_header(header, file.size)
    except ValueError as error:
        raise _damaged(file.path, str(error)) from error
    digest = hashlib.sha256(header + str(file.size).encode())
    for number in range(_SAMPLES):
        start = file.size * number // _SAMPLES
        digest.update(file.read(start, min(_SAMPLE_BYTES, file.size - start)))
    return tensors, digest.digest()


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{shown(path)}: {what}. Nothing was loaded; copy or export it again")


def _combined(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
