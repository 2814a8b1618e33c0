"""The list of a checkpoint's files, with their sizes and checksums, written last."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from .digests import FileDigest

MANIFEST_FILE = "sidestream.json"
FORMAT_VERSION = 2


def write_manifest(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Write the list of the files in `folder`, by their names, and bring it to disk."""
    files = {
        name: {"bytes": digest.num_bytes, "sha256": digest.sha256}
        for name, digest in sorted(digests.items())
    }
    content = json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1)
    with open(folder / MANIFEST_FILE, "x") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
