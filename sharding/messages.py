"""Phrases in messages: the first few names of many, and what is left of a disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

_NAMED = 6


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """`names`, or the first of them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + more


def room_in(folder: Path) -> str:
    """How much a full disk has left for files in `folder`, and what to do."""
    free_mib = shutil.disk_usage(folder).free / 2**20
    return (
        f"{free_mib:,.1f} MiB free in {folder}; make room, or lift the limit on the size of files"
    )
