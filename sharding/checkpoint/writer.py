"""Writes a checkpoint's files with their checksums, and says plainly why a disk took no more."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import WriteItem

from ..messages import room_in
from .digests import DigestedFile
from .stored import Digest

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
        self.latest = file = DigestedFile(path)
        with io.BufferedWriter(file) as stream:
            yield stream
        self.digests[Path(path).name] = file.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, as the protocol of DCP asks for it."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes to `folder`, one file a rank. `digests` are those of this rank's files, by name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # DCP's comes before the last bytes are out
        self.fs = self._files = _DigestingFileSystem()
        self.digests = self._files.digests
        self._folder = folder

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
