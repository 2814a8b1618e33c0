"""The safetensors format: what a header says and whether it can be true, and what a new one says.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces: {"__metadata__": {text: text}, "<name>": {"dtype": "F32",
              "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    rest      the tensors, row-major; their offsets count from here, without gap or overlap

A model of several files has an index beside them: {"weight_map": {"<name>": "<file>", ...}}.

Everything is decided here from bytes and integers, before a tensor is read. The format is read by
our own code, because a rank needs an interval of elements, anywhere, and writes tensors that come
in pieces: the package `safetensors` gives rows of a tensor, which may be as large as the tensor,
and writes only what is in memory as a whole. torch's HuggingFaceStorageReader is built on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..untrusted import parse_object, shown

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader, for an index too."""
LENGTH_BYTES = 8
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_FIELDS = ["data_offsets", "dtype", "shape"]
_ALIGNMENT_BYTES = 8
_MAX_DIMS = 64  # torch's own
_MAX_NUMEL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to store."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file: it starts at byte `start` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to write: `header` with its length before it, then the tensors, in this order."""

    name: str
    header: bytes
    tensors: dict[str, FileTensor]


@dataclass(frozen=True, slots=True)
class Export:
    """The files of a model; `index` is the content of the index, None for a single file."""

    files: tuple[PlannedFile, ...]
    index: bytes | None


# ---- what is read


def header_length(first: bytes, file_bytes: int) -> int:
    """The length in bytes of the header of a file that has `file_bytes` and starts with `first`.

    Raises:
        ValueError: it does not fit in the file or is more than the format allows.
    """
    if len(first) < LENGTH_BYTES:
        raise ValueError(f"expected at least {LENGTH_BYTES} bytes, got {len(first)}")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    limit = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if length > limit:
        raise ValueError(
            f"expected a header of at most {limit} bytes in a file of {file_bytes}, got a length "
            f"of {length}"
        )
    return length


def parse_header(header: bytes, file_bytes: int) -> dict[str, FileTensor]:
    """The tensors in a file of `file_bytes` with this `header` (without its length).

    Raises:
        ValueError: the header is none, or does not describe all bytes of the file exactly once.
    """
    if not header.startswith(b"{"):
        raise ValueError(f"expected a header that starts with '{{', got {header[:1]!r}")
    entries = parse_text(header, "header")
    metadata = entries.pop(_METADATA, {})
    if not (isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())):
        raise ValueError(f"expected texts in {_METADATA} of the header, got {_brief(metadata)}")
    data_start = LENGTH_BYTES + len(header)
    found = {name: _parse_entry(name, entry) for name, entry in entries.items()}
    position = 0
    for name, (spec, start, stop) in sorted(found.items(), key=lambda item: item[1][1:]):
        if start != position:
            kind = "a gap before" if start > position else "an overlap at"
            raise ValueError(f"expected tensors one after the other, got {kind} '{shown(name)}'")
        if stop - start != spec.nbytes:
            raise ValueError(
                f"expected {spec.nbytes} bytes of '{shown(name)}' with shape {list(spec.shape)} "
                f"and {spec.dtype}, got {stop - start}"
            )
        position = stop
    if position != file_bytes - data_start:
        raise ValueError(
            f"expected {position} bytes of tensors as the header says, got "
            f"{file_bytes - data_start}: the file was cut short or appended to"
        )
    return {
        name: FileTensor(spec.dtype, spec.shape, data_start + start)
        for name, (spec, start, _) in found.items()
    }


def parse_index(content: bytes) -> dict[str, str]:
    """The file of every tensor, from the content of an index.

    Raises:
        ValueError: it is no index, or names a file that is not beside it.
    """
    weight_map = parse_text(content, "index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"expected an object as the index's weight_map, got {_brief(weight_map)}")
    for name, file in weight_map.items():
        _require_text(name)
        if not (isinstance(file, str) and _is_plain(file)):
            raise ValueError(
                f"expected the name of a file in the index's own folder for '{shown(name)}', got "
                f"{_brief(file)}"
            )
    return weight_map


def parse_text(content: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `content`, which is `what`.

    Raises:
        ValueError: it is no JSON object in UTF-8, or has a name twice.
    """
    try:
        return parse_object(content)
    except ValueError as error:
        raise ValueError(
            f"expected a JSON object as {what}, got something else: {error}"
        ) from error


def _parse_entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """A tensor and its offsets, which may still be anywhere."""
    _require_text(name)
    if not isinstance(entry, dict) or sorted(entry) != _FIELDS:
        raise ValueError(f"expected {_FIELDS} of '{shown(name)}', got {_brief(entry)}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(code, str) and code in DTYPES):
        raise ValueError(
            f"expected one of {', '.join(DTYPES)} as dtype of '{shown(name)}', got {_brief(code)}"
        )
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"expected sizes as shape of '{shown(name)}', got {_brief(shape)}")
    if not _are_counts(offsets) or len(offsets) != len(("start", "stop")):
        raise ValueError(f"expected [start, stop] as offsets of '{shown(name)}', got "
                         f"{_brief(offsets)}")  # fmt: skip
    return TensorSpec(name, DTYPES[code], tuple(shape)), offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_NUMEL for value in values
    )


def _require_text(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, from an escape
        raise ValueError(f"expected a name in UTF-8, got {name!a}") from error


def _is_plain(file: str) -> bool:
    """Whether `file` can only lie in the folder that it is looked for in."""
    return file not in ("", ".", "..") and file.isprintable() and not set(file) & set("/\\")


def _brief(value: Any) -> str:
    text = ascii(value)
    limit = 80
    return text if len(text) <= limit else f"{text[:limit]}..."


# ---- what is written


def plan_export(specs: Sequence[TensorSpec], max_shard_bytes: float) -> Export:
    """The files for `specs`, of at most `max_shard_bytes` of tensors where one tensor is not more.

    Raises:
        ValueError: a dtype or a name has no place in the format.
    """
    shards = _split(specs, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in _one_to(len(shards))]
    files = tuple(_plan_file(name, shard) for name, shard in zip(names, shards, strict=True))
    if len(files) == 1:
        return Export(files, None)
    metadata = {
        "total_parameters": sum(math.prod(spec.shape) for spec in specs),
        "total_size": sum(spec.nbytes for spec in specs),
    }
    return Export(
        files, build_index(metadata, {n: file.name for file in files for n in file.tensors})
    )


def build_index(metadata: Any, weight_map: Mapping[str, str]) -> bytes:
    """The content of an index."""
    index = {"metadata": metadata, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _one_to(count: int) -> Iterable[int]:
    return range(1, count + 1)


def _split(specs: Sequence[TensorSpec], max_shard_bytes: float) -> list[list[TensorSpec]]:
    """As transformers cuts: in order, a tensor that is too large by itself."""
    shards: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    current_bytes = 0
    for spec in specs:
        if spec.nbytes > max_shard_bytes:
            shards.append([spec])
            continue
        if current_bytes + spec.nbytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(spec)
        current_bytes += spec.nbytes
    return [*shards, current] if current or not shards else shards


def _plan_file(name: str, specs: Sequence[TensorSpec]) -> PlannedFile:
    # Wide elements first: every tensor starts at a multiple of its element's size.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for spec in ordered:
        if spec.dtype not in _CODES:
            raise ValueError(
                f"dtype of '{shown(spec.name)}': expected one that safetensors has "
                f"({', '.join(DTYPES)}), got {spec.dtype}; convert it, or register a buffer with "
                "persistent=False"
            )
        _require_text(spec.name)
        if spec.name in entries:
            raise ValueError(f"expected a name that the format leaves free, got '{spec.name}'")
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"max_shard_bytes: expected files with headers of at most {MAX_HEADER_BYTES} bytes, "
            f"got {len(text)}; pass less, for more files with fewer tensors each"
        )
    file_bytes = LENGTH_BYTES + len(text) + position
    return PlannedFile(
        name, len(text).to_bytes(LENGTH_BYTES, "little") + text, parse_header(text, file_bytes)
    )
