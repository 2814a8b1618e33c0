"""`sidestream.json`: what a checkpoint holds, readable without pickle, and the sum of every file.

    {"sha256": "<of the text below>", "checkpoint":
    {"format_version": 2,
     "paths": {key: [its path in the nested state dict that was saved]},
     "tensors": {key: {"dtype", "shape", "chunks": [[offsets, sizes, file, start, bytes], ...]}},
     "values": {key: [file, start, bytes]},
     "digests": {file: [bytes, [CRC-32 of each 64 MiB, ...]]}}
    }

It is written last, so a checkpoint without it is not whole. The sums find damage and files of
another checkpoint, not malice: whoever can write to the folder can write them anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..storage import Location, create_file
from ..untrusted import parse_object
from .dcp_metadata import read_dcp_metadata
from .digests import identities_of
from .files import read_whole
from .stored import (
    DTYPES,
    SEGMENT_BYTES,
    BadCheckpoint,
    Chunk,
    Digest,
    Ints,
    Place,
    Stored,
    StoredTensor,
    counts,
    key_path,
    require_plain_name,
)

MANIFEST_FILE = "sidestream.json"
FORMAT_VERSION = 2
MARK = "sidestream"
"""A key of what is saved: it tells other readers who wrote a checkpoint, and us where its manifest
is gone.
"""
_HEAD = '{"sha256": "%s", "checkpoint":\n'
_TAIL = "\n}\n"


def write_manifest(folder: Location, digests: Mapping[str, Digest]) -> None:
    """Write the manifest of the checkpoint in `folder`, all of whose files are in `digests`.

    Raises:
        BadCheckpoint: a file is missing or has another size, or what is stored is not right.
        OSError: it cannot be written.
    """
    identities_of(folder, {name: d.num_bytes for name, d in digests.items()}, exact=True)
    stored = replace(read_dcp_metadata(folder), digests=digests)
    content = {
        "format_version": FORMAT_VERSION,
        "paths": stored.paths,
        "tensors": {
            key: {
                "chunks": [
                    [chunk.offsets, chunk.sizes, *_listed(chunk.place)] for chunk in tensor.chunks
                ],
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
            }
            for key, tensor in stored.tensors.items()
        },
        "values": {key: _listed(place) for key, place in stored.values.items()},
        "digests": {name: [d.num_bytes, d.crc32s] for name, d in digests.items()},
    }
    body = json.dumps(content, allow_nan=False)
    text = memoryview((_HEAD % _sum_of(body) + body + _TAIL).encode("ascii"))
    with create_file(folder / MANIFEST_FILE) as file:
        while text:
            text = text[file.write(text) :]


def read_manifest(folder: Location) -> Stored:
    """Read and check the manifest in `folder`.

    Raises:
        BadCheckpoint: it is not as it was written, or contradicts itself.
        OSError: it cannot be read.
    """
    text = read_whole(folder / MANIFEST_FILE).decode("ascii", errors="replace")
    head, body = text[: len(_HEAD % _sum_of(""))], text[len(_HEAD % _sum_of("")) : -len(_TAIL)]
    if head != _HEAD % _sum_of(body) or not text.endswith(_TAIL):
        raise BadCheckpoint(f"expected {MANIFEST_FILE} as it was written, got damaged text")
    try:
        content = parse_object(body.encode())
        if content["format_version"] != FORMAT_VERSION:
            raise BadCheckpoint(
                f"expected format_version {FORMAT_VERSION}, got {content['format_version']!r}; "
                "load it with the release of sidestream that wrote it"
            )
        return _stored(folder, content, _sum_of(body))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{MANIFEST_FILE}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint(
            f"{MANIFEST_FILE}: expected the fields of format {FORMAT_VERSION}, got "
            f"{type(error).__name__}: {error}"
        ) from error


def _stored(folder: Location, content: Mapping[str, Any], fingerprint: str) -> Stored:
    keys, paths = [*content["tensors"], *content["values"]], content["paths"]
    if sorted(keys) != sorted(paths):
        raise BadCheckpoint("expected every key once, and its path")
    return Stored(
        folder=folder,
        fingerprint=fingerprint,
        tensors={key: _tensor(entry) for key, entry in content["tensors"].items()},
        values={key: _place(*place) for key, place in content["values"].items()},
        paths={key: key_path(path) for key, path in paths.items()},
        digests={
            require_plain_name(name): _digest(num_bytes, counts(crc32s))
            for name, (num_bytes, crc32s) in content["digests"].items()
        },
    )


def _tensor(entry: Mapping[str, Any]) -> StoredTensor:
    chunks = (
        Chunk(counts(offsets), counts(sizes), _place(*place))
        for offsets, sizes, *place in entry["chunks"]
    )
    return StoredTensor(counts(entry["shape"]), DTYPES[entry["dtype"]], tuple(chunks))


def _place(file: object, start: object, num_bytes: object) -> Place:
    return Place(require_plain_name(file), *counts([start, num_bytes]))


def _digest(num_bytes: object, crc32s: Ints) -> Digest:
    digest = Digest(counts([num_bytes])[0], crc32s)
    if len(crc32s) != math.ceil(digest.num_bytes / SEGMENT_BYTES):
        raise BadCheckpoint(f"expected a sum for each {SEGMENT_BYTES} bytes, got {len(crc32s)}")
    return digest


def _listed(place: Place) -> list[str | int]:
    return [place.file, place.start, place.num_bytes]


def _sum_of(body: str) -> str:
    return hashlib.sha256(body.encode("ascii", errors="replace")).hexdigest()
