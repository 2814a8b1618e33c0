"""Writes a checkpoint's files, and says in plain words why a disk took no more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp

_ARCHIVE_SOURCE = "inline_container"
"""Names the part of torch that writes archives in its errors. What such an error tells is that the
archive came out shorter than it should; the reason that the system gave is lost there.
"""


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes to `folder`, one file a rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's part, as the protocol of DCP asks for it.

        Raises:
            OSError: the file could not be written as a whole.
        """
        try:
            return super().write_data(*args, **kwargs)
        except OSError as error:
            raise OSError(self._explained(str(error))) from error
        except RuntimeError as error:
            if _ARCHIVE_SOURCE not in str(error):
                raise
            raise OSError(self._explained("its file came out too short")) from error

    def _explained(self, reason: str) -> str:
        if not self._folder.is_dir():
            return reason
        free_mib = shutil.disk_usage(self._folder).free / 2**20
        return (
            f"{reason}, with {free_mib:,.1f} MiB free in {self._folder.parent}; make room, or lift "
            "the limit on the size of files"
        )
