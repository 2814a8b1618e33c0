"""Opens what is in a checkpoint's folder: by our manifest, or as a plain one of DCP without it."""

from __future__ import annotations

import os
from pathlib import Path

from .dcp_metadata import METADATA_FILE, read_dcp_metadata
from .digests import require_sums
from .files import open_regular
from .manifest import MANIFEST_FILE, MARK, read_manifest
from .stored import BadCheckpoint, Stored


def indices_of(folder: Path) -> list[Path]:
    """What has the name of a checkpoint's index in `folder`, whatever it is."""
    paths = (folder / name for name in (MANIFEST_FILE, METADATA_FILE))
    return [path for path in paths if os.path.lexists(path)]


def open_checkpoint(folder: Path) -> Stored:
    """What the checkpoint in `folder` holds; its files have not been looked at.

    Raises:
        BadCheckpoint: its index is damaged or contradicts itself, or is not the one it needs.
        OSError: it cannot be read.
    """
    if os.path.lexists(folder / MANIFEST_FILE):
        return read_manifest(folder)
    stored = read_dcp_metadata(folder)
    if stored.keys_under(MARK):
        raise BadCheckpoint(f"expected {MANIFEST_FILE} beside {METADATA_FILE}, got none")
    return stored


def identity_of(stored: Stored) -> tuple[tuple[int, int, int], ...]:
    """Tells whether ranks see the same files or copies: inode, size and time of each.

    Raises:
        BadCheckpoint: one is missing or no regular file.
        OSError: one cannot be opened.
    """
    found = []
    for name in sorted({place.file for _, place in stored.places()} | {*(stored.digests or ())}):
        with open_regular(stored.folder / name) as file:
            status = os.fstat(file.fileno())
        found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def require_files(stored: Stored, rank: int, world_size: int) -> None:
    """Check that the files are those that were written: this rank's share of them where that takes
    time.

    Raises:
        BadCheckpoint: one is missing, too short, damaged, or of another checkpoint.
        OSError: one cannot be read.
    """
    if stored.digests is not None:
        require_sums(stored.folder, stored.digests, rank, world_size)
        return
    ends: dict[str, int] = {}
    for _, place in stored.places():
        ends[place.file] = max(place.start + place.num_bytes, ends.get(place.file, 0))
    for name, end in sorted(ends.items()):
        with open_regular(stored.folder / name) as file:
            found = os.fstat(file.fileno()).st_size
        if found < end:
            raise BadCheckpoint(f"expected {name} of at least {end} bytes, got {found}")
