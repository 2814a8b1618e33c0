"""Reads what torch.distributed.checkpoint wrote, without running code that a file might carry.

A stored tensor's key is its path in the nested state dict, joined by dots; what is no tensor is a
pickle. Here the pickles of the metadata and of the values may name only plain types. Every stored
value is a zip archive of its own, whose checksums are compared before the first one is used.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .ranks import Ranks, this_rank
from .running_dcp import running_dcp

METADATA_FILE = ".metadata"
_CHUNK_BYTES = 1 << 20

Key = str
KeyPath = tuple[str | int, ...]


class CheckpointReader(dcp.FileSystemReader):
    """The checkpoint in `folder`, opened: its metadata is read. `fingerprint` tells it from others.

    Raises:
        ValueError: the metadata is damaged or names what a checkpoint has no need of.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        content = (folder / METADATA_FILE).read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.metadata = _load_metadata(content, folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, as the protocol of DCP asks for it."""
        return self.metadata

    def path_of(self, key: Key) -> KeyPath:
        """Where `key` stands in the nested state dict that was saved."""
        paths = self.metadata.planner_data
        return tuple(paths[key]) if isinstance(paths, dict) and key in paths else (key,)

    def keys_under(self, *prefix: str | int) -> list[Key]:
        """The keys whose path begins with `prefix`."""
        return [
            key
            for key in self.metadata.state_dict_metadata
            if self.path_of(key)[: len(prefix)] == prefix
        ]

    def shape_of(self, key: Key) -> torch.Size | None:
        """The shape of the tensor stored under `key`, None if that is no tensor."""
        stored = self.metadata.state_dict_metadata[key]
        return stored.size if isinstance(stored, TensorStorageMetadata) else None

    def dtype_of(self, key: Key) -> torch.dtype:
        """The dtype of the tensor stored under `key`."""
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), "not a tensor"
        return stored.properties.dtype

    def read(self, keys: Iterable[Key]) -> dict[str, Any]:
        """Read `keys`, tensors whole and on the CPU, by this rank alone; nested as they were saved.

        Raises:
            RuntimeError: a value is damaged.
            ValueError: a value holds objects of other than plain types.
        """
        values: dict[Key, Any] = {}
        for key in keys:
            shape = self.shape_of(key)
            values[key] = None if shape is None else torch.empty(shape, dtype=self.dtype_of(key))
        self.require_sound(values)
        planner = _PlainPlanner()
        with running_dcp(f"reading {self.folder}", this_rank()):
            dcp.load(values, storage_reader=self, planner=planner, no_dist=True)
        if planner.refused:
            raise ValueError(
                f"checkpoint {self.folder}: expected plain values, got objects that only unsafe "
                f"unpickling could read under {', '.join(planner.refused)}; nothing was loaded"
            )
        nested: dict[str, Any] = {}
        for key, value in values.items():
            _insert(nested, self.path_of(key), value)
        return nested

    def read_into(self, tensors: dict[Key, Tensor], ranks: Ranks) -> None:
        """Fill `tensors`, sharded or plain, in place (a collective over `ranks`)."""
        with running_dcp(f"reading {self.folder}", ranks):
            dcp.load(
                tensors,
                storage_reader=self,
                planner=_PlainPlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )

    def require_whole(self) -> None:
        """Check that the files are there.

        Raises:
            RuntimeError: one is missing or shorter than the metadata says.
        """
        if lack := self.lack():
            raise RuntimeError(
                f"checkpoint {self.folder}: {lack}; the checkpoint is not whole, load another one. "
                "Nothing was loaded"
            )

    def require_sound(self, wanted: Mapping[Key, Any]) -> None:
        """Check what this rank would read into `wanted`: None, or a tensor of the right layout.

        That is one more reading, so the one that counts comes from the system's cache.

        Raises:
            RuntimeError: a stored value is damaged.
        """
        planner = _PlainPlanner()
        planner.set_up_planner(dict(wanted), self.metadata, is_coordinator=False)
        for index in dict.fromkeys(
            item.storage_index for item in planner.create_local_plan().items
        ):
            place = self.metadata.storage_data[index]
            if getattr(place, "transform_descriptors", None):
                continue  # compressed or the like: no archive yet
            with open(self.folder / place.relative_path, "rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            if not _is_sound(content):
                raise RuntimeError(
                    f"checkpoint {self.folder}: expected '{index.fqn}' in {place.relative_path} "
                    "as it was written, got damaged bytes; load another checkpoint. Nothing was "
                    "loaded"
                )

    def lack(self) -> str | None:
        """The first file that is missing or shorter than the metadata says, None without one."""
        needed: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
        for name, num_bytes in sorted(needed.items()):
            file = self.folder / name
            found = file.stat().st_size if file.is_file() else None
            if found is None or found < num_bytes:
                got = "no such file" if found is None else f"{found} bytes"
                return f"expected {name} of at least {num_bytes} bytes, got {got}"
        return None


class _PlainPlanner(dcp.DefaultLoadPlanner):
    """Loads a flat dict; takes values apart only if their types are plain, and lists the others."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.refused: list[Key] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one value in, as the protocol of DCP hands it over."""
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            self.refused.append(key)


def _is_sound(archive: bytes) -> bool:
    """Whether all that `archive`, a stored value, holds has the checksum it was stored with."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            for info in files.infolist():
                if info.CRC:  # 0: torch.save was told not to compute it
                    with files.open(info) as file:
                        while file.read(_CHUNK_BYTES):
                            pass
    except Exception:  # noqa: BLE001 - damaged bytes can make the parser raise anything
        return False
    return True


def require_plain(name: str, value: object) -> None:
    """Check that `value`, stored under `name`, can be read back without unsafe unpickling.

    Raises:
        TypeError: it cannot.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # an object can raise anything when it is pickled
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        found = (
            f"{unsafe[1]}, which only unsafe unpickling could read"
            if unsafe
            else f"an object that cannot be saved ({error})"
        )
        raise TypeError(
            f"{name}: expected numbers, strings, tensors and containers of them, got {found}; save "
            "its state instead (for example a state_dict)"
        ) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes metadata consists of and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or constant `module.name`, if metadata may name it."""
        if module == "pathlib" or module.startswith(("pathlib.", "torch.distributed.checkpoint.")):
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, type):
                return found
        if module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, (torch.dtype, torch.layout)):
                return found
        if (module, name) in {
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
        }:
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"metadata names {module}.{name}")


def _load_metadata(content: bytes, folder: Path) -> Metadata:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise ValueError(
            f"checkpoint {folder}: expected metadata of torch.distributed.checkpoint in "
            f"{METADATA_FILE}, got something else: {type(error).__name__} {error}; load another "
            "checkpoint"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(
            f"checkpoint {folder}: expected metadata of torch.distributed.checkpoint in "
            f"{METADATA_FILE}, got {type(metadata).__name__}"
        )
    return metadata


def _insert(root: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Put `value` at `path` in nested dicts (text parts) and lists (numbers)."""
    container: Any = root
    part: Any
    for part, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(container, list):
            container.extend([None] * (part + 1 - len(container)))
        if following is None:
            container[part] = value
            return
        if isinstance(container, list):
            if container[part] is None:
                container[part] = [] if isinstance(following, int) else {}
        else:
            container.setdefault(part, [] if isinstance(following, int) else {})
        container = container[part]
