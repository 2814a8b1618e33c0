"""URLs as locations, and their objects: read by ranges, written whole, by any driver of fsspec."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from .drivers import driver_of, telling

_BEGINNING = re.compile(r"[^/]*:/")  # also of a URL that pathlib has shortened
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_OF_FILES = ("file", "local")
_PATTERN = re.compile(r"[*?\[]")  # what fsspec takes a name to remove for a pattern by
_BLOCK_BYTES = 1 << 16  # of what lies between tensors: read once for many small readings
_RANGE_BYTES = 8 << 20
_RANGES_AT_ONCE = 8


def is_url(text: object) -> bool:
    """Whether `text` begins as a URL does, right or wrong; no path may: `./a:/b` is one."""
    return isinstance(text, str) and _BEGINNING.match(text) is not None


@dataclass(frozen=True, slots=True)
class Url:
    """`protocol://path`, where `path` has no `/` at its ends, and the verbs of a path that there
    are for it. Objects are all that is stored: a folder is there as long as something is below it.
    """

    protocol: str
    path: str

    @classmethod
    def of(cls, text: str) -> Url:
        """The URL that `text` is.

        Raises:
            ValueError: it is none, or names no place that can be written to.
        """
        match = _URL.fullmatch(text)
        parts = match[2].strip("/").split("/") if match else []
        # s3fs writes to the object itself where a version of it is named.
        is_whole = text.isprintable() and "?versionId=" not in text
        if match is None or {"", ".", ".."} & {*parts} or not is_whole:
            raise ValueError(
                f"expected a URL such as s3://bucket/folder, each name in it once, got {text!r}; "
                "pass URLs as text, and paths that begin like one from / on"
            )
        if match[1].lower() in _OF_FILES:
            raise ValueError(f"expected file:/// and an absolute path, or a path, got {text!r}")
        return cls(match[1].lower(), "/".join(parts))

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    def __fspath__(self) -> str:
        return str(self)

    def __truediv__(self, name: str) -> Url:
        return Url(self.protocol, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """All but the last part."""
        return Url(self.protocol, self.path.rpartition("/")[0])

    @property
    def parents(self) -> Sequence[Url]:
        """The folders that it lies in, up to the bucket or the like."""
        parts = self.path.split("/")
        return [Url(self.protocol, "/".join(parts[:end])) for end in range(len(parts) - 1, 0, -1)]

    def with_name(self, name: str) -> Url:
        """What is called `name` beside it."""
        return Url(self.protocol, f"{self.path.rpartition('/')[0]}/{name}".lstrip("/"))

    @property
    def driver(self) -> Any:
        """fsspec's file system for it."""
        return driver_of(self.protocol)

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        with telling(self):
            try:
                return bool(self.driver.info(str(self))["type"] == "file")
            except FileNotFoundError:
                return False

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        with telling(self), contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self.driver.rm_file(str(self))

    def entries(self) -> dict[str, bool]:
        """What is directly below it, and whether each is a folder."""
        with telling(self):
            driver = self.driver
            own = driver._strip_protocol(str(self)).strip("/")
            try:
                found = driver.ls(str(self), detail=True)
            except FileNotFoundError:
                return {}
        names = {entry["name"].strip("/"): entry["type"] == "directory" for entry in found}
        return {
            name.rpartition("/")[2]: is_folder for name, is_folder in names.items() if name != own
        }

    def write(self, content: bytes) -> None:
        """Put `content` there, whole or not at all, in place of what is there."""
        with telling(self):
            self.driver.pipe_file(str(self), content)

    def remove_files(self, names: list[str]) -> None:
        """Remove the objects `names` below it; those that are not there are fine."""
        urls = [str(self / name) for name in names]
        if not any(map(_PATTERN.search, urls)):
            with contextlib.suppress(Exception):  # not all drivers can, or remove all of them
                if urls:
                    self.driver.rm(urls)  # many in one request
                return
        for name in names:
            (self / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the object, and all below; nothing there is fine."""
        with telling(self), contextlib.suppress(FileNotFoundError):
            if not _PATTERN.search(self.path):
                self.driver.rm(str(self), recursive=True)
                return
            for name in self.driver.find(str(self)):
                self.driver.rm_file(name)


class UrlFile:
    """An object that is read by ranges; `identity` tells whether other ranks see the same one."""

    piece_bytes: ClassVar[int] = _RANGE_BYTES
    """How many bytes at a time are read with profit."""

    def __init__(self, url: Url) -> None:
        """Look at it.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
        """
        self._url = url
        with telling(url):
            self._driver = url.driver
            found = self._driver.info(str(url))
        if found["type"] != "file":
            raise FileNotFoundError(f"{url}: expected an object, got a folder")
        if found["size"] is None:
            raise OSError(f"{url}: expected an object of a known size, got one that is not told")
        self.num_bytes = int(found["size"])
        # A tag of the content or the time of writing, whatever the driver tells of it.
        marks = sorted((key, str(value)) for key, value in found.items() if key in _MARKS)
        self.identity: tuple[int, ...] = (self.num_bytes, zlib.crc32(repr(marks).encode()))
        self._block_at, self._block = 0, b""

    def read_at(self, memory: memoryview, position: int) -> memoryview:
        """Fill `memory` from byte `position` on; returns the rest, which lies beyond the end."""
        end = min(position + len(memory), self.num_bytes)
        if len(memory) >= _BLOCK_BYTES:
            return self._read_ranges(memory, position, end)
        while position < end:
            if not self._block_at <= position < self._block_at + len(self._block):
                first = position // _BLOCK_BYTES * _BLOCK_BYTES
                last = min(first + _BLOCK_BYTES, self.num_bytes)
                self._block_at, self._block = first, self._ranges([(first, last)])[0]
            start = position - self._block_at
            piece = self._block[start : start + end - position]
            memory[: len(piece)] = piece
            memory, position = memory[len(piece) :], position + len(piece)
        return memory

    def _read_ranges(self, memory: memoryview, position: int, end: int) -> memoryview:
        while position < end:
            starts = range(position, end, _RANGE_BYTES)[:_RANGES_AT_ONCE]
            for content in self._ranges([(at, min(at + _RANGE_BYTES, end)) for at in starts]):
                memory[: len(content)] = content
                memory, position = memory[len(content) :], position + len(content)
        return memory

    def _ranges(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        with telling(self._url):
            found: list[bytes] = self._driver.cat_ranges(
                [str(self._url)] * len(ranges),
                [start for start, _ in ranges],
                [end for _, end in ranges],
                max_gap=None,
                on_error="raise",
            )
        for content, (start, end) in zip(found, ranges, strict=True):
            if len(content) != end - start:
                raise OSError(
                    f"{self._url}: expected bytes {start} to {end}, got {len(content)} of them"
                )
        return found

    def __enter__(self) -> UrlFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._block = b""


_MARKS = ("ETag", "etag", "LastModified", "mtime", "created", "updated", "generation", "version_id")


class NewUrlFile:
    """An object that is there when it is closed, in place of what is there, and not before."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self._is_open = True
        with telling(url):
            self._file = url.driver.open(str(url), "wb")

    def write(self, content: memoryview) -> int:
        """Append `content`; returns how many bytes."""
        if self._is_open:
            with telling(self._url):
                self._file.write(content)
        return len(content)

    def close(self) -> None:
        """Have it be there.

        Raises:
            OSError: it could not be written.
        """
        if not self._is_open:
            return
        try:
            with telling(self._url):
                self._file.close()
        except BaseException:
            self.abandon()
            raise
        self._is_open = False

    def abandon(self) -> None:
        """Have it not be there: end the upload of its parts, which the storage would keep."""
        self._is_open = False
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(AttributeError):
            # A driver's file writes what it still has when it is closed, also by its end.
            self._file.closed = True

    def __enter__(self) -> NewUrlFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
        self.close()
