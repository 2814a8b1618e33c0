"""Writes a checkpoint's files with their checksums, and says plainly why a disk took no more."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import WriteItem

from ..messages import room_in
from ..storage import Location, Url
from .digests import DigestedFile
from .stored import Digest
from .url_folder import new_save_name

_TEMPORARY = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ARCHIVE_SOURCE = "inline_container"
"""Names the part of torch that writes archives in its errors. What such an error tells is that the
archive came out shorter than it should; the reason that the system gave is lost there.
"""


class _DigestingFileSystem(FileSystem):
    """Has `digests` of the files that were written, by their names."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}
        self.latest: DigestedFile | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a new file, as the protocol of DCP asks for it."""
        assert mode == "wb", "a writer does not read"
        self.latest = file = DigestedFile(self._location(path))
        with io.BufferedWriter(file) as stream:
            try:
                yield stream
            except BaseException:
                file.abandon()
                raise
        self.digests[Path(path).name] = file.digest()

    def _location(self, path: str | os.PathLike[str]) -> Location:
        return Path(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, as the protocol of DCP asks for it."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes to `folder`, one file a rank. `digests` are those of this rank's files, by name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # DCP's comes before the last bytes are out
        self._folder = folder
        self._use(_DigestingFileSystem())

    def _use(self, files: _DigestingFileSystem) -> None:
        self.fs = self._files = files
        self.digests = files.digests

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's part, as the protocol of DCP asks for it.

        Raises:
            OSError: the file could not be written as a whole.
        """
        try:
            return super().write_data(*args, **kwargs)
        except OSError as error:
            raise OSError(self._explained(error)) from error
        except RuntimeError as error:
            cause = None if self._files.latest is None else self._files.latest.error
            if _ARCHIVE_SOURCE not in str(error) or cause is None:
                raise
            if not isinstance(cause, OSError):
                raise cause from error
            raise OSError(self._explained(cause)) from error

    def _explained(self, error: OSError) -> str:
        reason = str(error)
        if error.errno not in _FULL or not self._folder.is_dir():
            return reason
        return f"{reason}, with {room_in(self._folder.parent)}"


class _UrlFileSystem(_DigestingFileSystem):
    """The objects below `folder`, none of which are renamed: what DCP calls `<name>.tmp` until it
    is complete is `<name>` at once, since an object is there when it is complete.
    """

    def __init__(self, folder: Url) -> None:
        super().__init__()
        self._folder = folder

    def _location(self, path: str | os.PathLike[str]) -> Location:
        return self._folder / Path(path).name.removesuffix(_TEMPORARY)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Folders need not be made."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """What is there is replaced."""
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Forget the metadata, which is there: the one object that is written over an older one, so
        the manifest before this one must not know it.
        """
        del self.digests[Path(path).name]


class _UrlWriter(CheckpointWriter):
    """Writes to objects below `folder` that no other save writes to."""

    def __init__(self, folder: Url) -> None:
        super().__init__(Path(folder.path))
        self._url = folder
        self._use(_UrlFileSystem(folder))

    @property
    def checkpoint_id(self) -> str:
        """What the metadata says of where it is."""
        return str(self._url)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Have all ranks' files begin with the name of this save; one rank does, for all."""
        save = new_save_name()
        made = super().prepare_global_plan(plans)
        parts = [replace(p.storage_data, prefix=save + p.storage_data.prefix) for p in made]
        return [replace(p, storage_data=part) for p, part in zip(made, parts, strict=True)]

    def _explained(self, error: OSError) -> str:
        return str(error)


def writer_to(folder: Location) -> CheckpointWriter:
    """What writes a checkpoint to `folder`."""
    return _UrlWriter(folder) if isinstance(folder, Url) else CheckpointWriter(folder)


class RowMajorPlanner(dcp.DefaultSavePlanner):
    """Plans as DCP does; every chunk is written with its elements in row-major order, and as they
    are read, since that is what our own reader takes an archive for.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """What is written for an item, as the protocol of DCP asks for it."""
        made = super().transform_object(write_item, object)
        if isinstance(made, Tensor):
            plain = made.detach().resolve_conj().resolve_neg()
            return plain.contiguous().as_subclass(Tensor)
        return made
