"""Opens what is in a checkpoint's folder: by our manifest, or as a plain one of DCP without it."""

from __future__ import annotations

from ..storage import Location, is_there
from .dcp_metadata import METADATA_FILE, read_dcp_metadata
from .digests import identities_of
from .manifest import MANIFEST_FILE, MARK, read_manifest
from .stored import BadCheckpoint, Stored


def indices_of(folder: Location) -> list[Location]:
    """What has the name of a checkpoint's index in `folder`, whatever it is."""
    paths = (folder / name for name in (MANIFEST_FILE, METADATA_FILE))
    return [path for path in paths if is_there(path)]


def open_checkpoint(folder: Location) -> Stored:
    """What the checkpoint in `folder` holds; its files have not been looked at.

    Raises:
        BadCheckpoint: its index is damaged or contradicts itself, or is not the one it needs.
        OSError: it cannot be read.
    """
    if is_there(folder / MANIFEST_FILE):
        return read_manifest(folder)
    stored = read_dcp_metadata(folder)
    if stored.keys_under(MARK):
        raise BadCheckpoint(f"expected {MANIFEST_FILE} beside {METADATA_FILE}, got none")
    return stored


def identity_of(stored: Stored) -> tuple[tuple[int, ...], ...]:
    """Check that the files are there, by their sizes; returns the identity of each, which tells
    whether ranks see the same files or copies.

    Raises:
        BadCheckpoint: one is missing, or is too short or, where its size is known, too long.
        OSError: one cannot be opened.
    """
    sizes: dict[str, int] = {}
    for _, place in stored.places():
        sizes[place.file] = max(place.start + place.num_bytes, sizes.get(place.file, 0))
    if stored.digests is not None:
        sizes = {name: digest.num_bytes for name, digest in stored.digests.items()}
    return identities_of(stored.folder, sizes, exact=stored.digests is not None)
