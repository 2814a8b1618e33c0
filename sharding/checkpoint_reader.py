"""Reads what torch.distributed.checkpoint wrote, without running code that a file might carry.

A stored tensor's key is its path in the nested state dict, joined by dots; what is no tensor is a
pickle. Here the pickles of the metadata and of the values may name only plain types.
"""

from __future__ import annotations

import importlib
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from .errors import communicating

METADATA_FILE = ".metadata"

Key = str
KeyPath = tuple[str | int, ...]


class CheckpointReader(dcp.FileSystemReader):
    """The checkpoint in `folder`, opened: its metadata is read and its files are all there.

    Raises:
        ValueError: the metadata is damaged or names what a checkpoint has no need of.
        RuntimeError: a file is missing or shorter than the metadata says.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        with open(folder / METADATA_FILE, "rb") as file:
            self.metadata = _load_metadata(file, folder)
        self._require_files()

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
            ValueError: a value holds objects of other than plain types.
        """
        values: dict[Key, Any] = {}
        for key in keys:
            shape = self.shape_of(key)
            values[key] = None if shape is None else torch.empty(shape, dtype=self.dtype_of(key))
        planner = _PlainPlanner()
        with running_dcp(f"reading {self.folder}"):
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

    def read_into(self, tensors: dict[Key, Tensor]) -> None:
        """Fill `tensors`, sharded or plain, in place (a collective)."""
        with running_dcp(f"reading {self.folder}"):
            dcp.load(tensors, storage_reader=self, planner=_PlainPlanner())

    def _require_files(self) -> None:
        needed: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            end = place.offset + place.length
            needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
        for name, num_bytes in sorted(needed.items()):
            file = self.folder / name
            found = file.stat().st_size if file.exists() else None
            if found is None or found < num_bytes:
                raise RuntimeError(
                    f"checkpoint {self.folder}: expected {name} of at least {num_bytes} bytes, got "
                    f"{'no such file' if found is None else f'{found} bytes'}; the checkpoint is "
                    "not whole, load another one. Nothing was loaded"
                )


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


def require_plain(extra: Any) -> None:
    """Check that `extra` can be read back without unsafe unpickling.

    Raises:
        TypeError: it cannot.
    """
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            "extra: expected numbers, strings, tensors and containers of them, got an object that "
            "only unsafe unpickling could read; save its state instead (for example a state_dict). "
            f"{str(error).splitlines()[0]}"
        ) from error


@contextmanager
def running_dcp(what: str) -> Iterator[None]:
    """Keep DCP's note on single processes quiet, and turn its errors into ordinary ones.

    Raises:
        RuntimeError: in place of CheckpointException, which `except Exception` would miss.
        CommunicationError: a rank died meanwhile.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        try:
            with communicating(what):
                yield
        except dcp.CheckpointException as error:
            failures = [f"rank {rank}: {kept[0]!r}" for rank, kept in error.failures.items()]
            raise RuntimeError(f"{what} failed on {'; '.join(failures)}") from error


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


def _load_metadata(file: BinaryIO, folder: Path) -> Metadata:
    try:
        metadata = _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise ValueError(
            f"checkpoint {folder}: expected metadata of torch.distributed.checkpoint in "
            f"{METADATA_FILE}, got something else: {error}"
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
