"""A checkpoint at a URL: objects of one folder; its manifest, written last, says which of them.

    <url>/<save>__<rank>_0.distcp   data; `<save>` is of one save alone: nothing is written twice
    <url>/.metadata                 for other readers of torch.distributed.checkpoint
    <url>/sidestream.json           names the data; until it is written the one before counts

An object store renames nothing, and may tell late what is in a folder. So an object counts if the
manifest names it; the others are what saves that were killed have left, and the next save removes
them, as it does with those of the checkpoint that it replaces.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..messages import listed
from ..storage import Url, entries_of, remove_files, write_whole
from ..untrusted import shown
from .manifest import MANIFEST_FILE, read_manifest
from .opening import indices_of
from .stored import BadCheckpoint

REMOVING_FILE = "sidestream.removing"
"""Says that a checkpoint is being removed: what is left of it, without its manifest, is nothing."""
_PROBE_FILE = "sidestream.probe"
_DATA = re.compile(r"([0-9a-f]{24})?__\d+_\d+\.distcp", re.ASCII)
_OTHERS = (MANIFEST_FILE, ".metadata", _PROBE_FILE, REMOVING_FILE)


def new_save_name() -> str:
    """What the names of a save's data begin with; later saves have later ones."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class UrlTarget:
    """Where a checkpoint is saved; as `target.Target` says."""

    location: Url

    @property
    def draft(self) -> Url:
        """What ranks write to."""
        return self.location

    def prepare(self, rank: int, take: Callable[[], None]) -> None:
        """See that `rank` can write there, and remove what killed saves have left.

        Raises:
            FileExistsError: something else is there, or it lies in another checkpoint.
            OSError: it cannot write there.
        """
        try:
            self._require_room()
            take()
            probe = self.location / _PROBE_FILE
            write_whole(probe, b"sidestream")
            probe.unlink()
            (self.location / REMOVING_FILE).unlink(missing_ok=True)
            self._remove_unnamed()
        except FileExistsError:
            raise
        except OSError as error:
            raise OSError(
                f"path: expected a place where rank {rank} can write and remove objects, got "
                f"{shown(self.location)}, where it cannot ({error}); check the URL, the "
                "credentials and the endpoint"
            ) from error

    def publish(self) -> None:
        """After the manifest: remove what the checkpoint before consisted of."""
        self._remove_unnamed()

    def discard(self) -> None:
        """What a save has left that failed stays until the next one, which looks at the manifest:
        whether this one was written may not be known here.
        """

    def _require_room(self) -> None:
        target = self.location
        around = (folder for folder in target.parents if _has_manifest(folder))
        if (found := next(around, None)) is not None:
            raise FileExistsError(
                f"path: expected a place outside other checkpoints, got {shown(target)} inside "
                f"that at {shown(found)}; give every model a folder of its own"
            )
        others = [
            name
            for name, is_folder in entries_of(target).items()
            if is_folder or not (name in _OTHERS or _DATA.fullmatch(name))
        ]
        if others or target.is_file():
            found_text = f"other objects ({listed(sorted(map(shown, others)))})"
            raise FileExistsError(
                f"path: expected a checkpoint to replace or nothing at {shown(target)}, got "
                f"{found_text if others else 'an object'}; give another URL"
            )

    def _remove_unnamed(self) -> None:
        """Remove data that the manifest does not name. Where no manifest can be read but something
        is there, all of it stays until another one is.
        """
        # Not by what the folder's listing shows, which may lag behind.
        if (self.location / MANIFEST_FILE).is_file():
            try:
                named = {*(read_manifest(self.location).digests or {})}
            except BadCheckpoint:
                return
        elif indices_of(self.location):
            return
        else:
            named = set()
        data = [name for name in entries_of(self.location) if _DATA.fullmatch(name)]
        with contextlib.suppress(OSError):  # the next save tries again
            remove_files(self.location, [name for name in data if name not in named])


def _has_manifest(folder: Url) -> bool:
    try:
        return (folder / MANIFEST_FILE).is_file()
    except PermissionError:
        return False  # one who may write below it alone need not be allowed to look there


def order_of(names: list[str]) -> str:
    """What orders checkpoints, of whose folders these are the `names`, by when they were saved."""
    matches = (_DATA.fullmatch(name) for name in names)
    return max((match[1] or "" for match in matches if match), default="")


def remove_checkpoint(folder: Url) -> None:
    """Remove the checkpoint at `folder`; wherever that ends, nobody reads what is left."""
    marker = folder / REMOVING_FILE
    write_whole(marker, b"sidestream")
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    remove_files(folder, [name for name in entries_of(folder) if name != REMOVING_FILE])
    marker.unlink(missing_ok=True)
