"""Reads `.metadata` of torch.distributed.checkpoint, a pickle, without running anything it names.

The unpickler gives stand-ins for the classes that metadata consists of, chosen from a table by
module and name. Nothing is imported and nothing of torch is called: a stand-in keeps what it is
given, and all that is taken out of it has its type checked.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

from ..storage import Location
from .files import read_whole
from .stored import (
    DTYPES,
    BadCheckpoint,
    Chunk,
    Ints,
    Key,
    Place,
    Stored,
    StoredTensor,
    counts,
    key_path,
    require_plain_name,
)

METADATA_FILE = ".metadata"

T = TypeVar("T")


class _Record:
    """Keeps the state of an object; what it was made with does not matter."""

    __slots__ = ("state",)
    state: Any

    def __new__(cls, *_: object) -> _Record:
        record = object.__new__(cls)
        record.state = {}
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Metadata(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Bytes(_Record):
    __slots__ = ()


class _Properties(_Record):
    __slots__ = ()


class _Chunk(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()


class _Storage(_Record):
    __slots__ = ()


_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_KNOWN: dict[tuple[str, str], object] = {
    (_DCP, "Metadata"): _Metadata,
    (_DCP, "TensorStorageMetadata"): _Tensor,
    (_DCP, "BytesStorageMetadata"): _Bytes,
    (_DCP, "TensorProperties"): _Properties,
    (_DCP, "ChunkStorageMetadata"): _Chunk,
    (_DCP, "MetadataIndex"): _Index,
    (_DCP, "StorageMeta"): _Record,
    (_DCP, "_MEM_FORMAT_ENCODING"): _Record,
    (_OLD, "TensorProperties"): _Properties,
    (_OLD, "MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Storage,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): _Record
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


_PYTHON_UNPICKLER: Any = pickle._Unpickler
_OPCODES = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINPUT),
        *(pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE),
        *(pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE1),
        *(pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND),
        *(pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.GLOBAL),
        *(pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    )
)


class _Unpickler(_PYTHON_UNPICKLER):
    """Python's own unpickler, not that in C: its memo is as large as what is in it, whatever number
    an entry claims to have.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        opcode: _PYTHON_UNPICKLER.dispatch[opcode] for opcode in _OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for `module.name`."""
        if (module, name) not in _KNOWN:
            raise BadCheckpoint(f"it names {module}.{name}, which metadata has no need of")
        return _KNOWN[module, name]

    def _set_items(self) -> None:
        # Hashing nested tuples that repeat each other takes for ever.
        if any(type(key) not in (str, _Index) for key in self.stack[::2]):
            raise BadCheckpoint("it has keys other than names")
        _PYTHON_UNPICKLER.load_setitems(self)

    def _set_item(self) -> None:
        if type(self.stack[-2]) not in (str, _Index):
            raise BadCheckpoint("it has a key other than a name")
        _PYTHON_UNPICKLER.load_setitem(self)

    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.SETITEM[0]] = _set_item


def read_dcp_metadata(folder: Location) -> Stored:
    """Read and check the metadata in `folder`.

    Raises:
        BadCheckpoint: it is damaged, contradicts itself or names what metadata has no need of.
        OSError: it cannot be read.
    """
    content = read_whole(folder / METADATA_FILE)
    try:
        metadata = _require(_Metadata, _Unpickler(io.BytesIO(content)).load()).state
        return _stored(folder, metadata, hashlib.sha256(content).hexdigest())
    # A damaged pickle can make the unpickler raise anything, MemoryError and RecursionError too.
    except Exception as error:
        reason = (
            str(error) if isinstance(error, BadCheckpoint) else f"{type(error).__name__} {error}"
        )
        raise BadCheckpoint(
            f"expected metadata of torch.distributed.checkpoint in {METADATA_FILE}, got something "
            f"else: {reason}"
        ) from error


def _stored(folder: Location, metadata: Mapping[str, Any], fingerprint: str) -> Stored:
    places = _places(metadata["storage_data"])
    tensors: dict[Key, StoredTensor] = {}
    values: dict[Key, Place] = {}
    for key, entry in _require(dict, metadata["state_dict_metadata"]).items():
        if isinstance(entry, _Bytes):
            values[_require(str, key)] = places.pop((key, None))
        else:
            tensors[_require(str, key)] = _tensor(key, _require(_Tensor, entry).state, places)
    if places:
        raise BadCheckpoint(f"expected what is stored to be in the index, got {next(iter(places))}")
    paths = _require(dict, metadata.get("planner_data") or {})
    return Stored(
        folder=folder,
        fingerprint=fingerprint,
        tensors=tensors,
        values=values,
        paths={key: key_path(paths.get(key, (key,))) for key in metadata["state_dict_metadata"]},
        digests=None,
    )


def _places(storage_data: object) -> dict[tuple[Key, Ints | None], Place]:
    """Where things are stored, by key and the offset of their chunk."""
    found: dict[tuple[Key, Ints | None], Place] = {}
    for index, info in _require(dict, storage_data).items():
        at, stored = _require(_Index, index).state, _require(_Storage, info).state
        offset = at.get("offset")
        key = _require(str, at["fqn"]), None if offset is None else counts(offset)
        if key in found:
            raise BadCheckpoint(f"expected every chunk once, got {key} twice")
        if stored.get("transform_descriptors"):
            raise BadCheckpoint(f"{key} is compressed or the like; save it without extensions")
        found[key] = Place(
            require_plain_name(stored["relative_path"]),
            *counts((stored["offset"], stored["length"])),
        )
    return found


def _tensor(
    key: Key, state: Mapping[str, Any], places: dict[tuple[Key, Ints | None], Place]
) -> StoredTensor:
    boxes = [_require(_Chunk, chunk).state for chunk in _require(list, state["chunks"])]
    boxes = [(counts(box["offsets"]), counts(box["sizes"])) for box in boxes]
    dtype = _require(
        torch.dtype, _require(tuple, _require(_Properties, state["properties"]).state)[0]
    )
    chunks = tuple(Chunk(offsets, sizes, places.pop((key, offsets))) for offsets, sizes in boxes)
    return StoredTensor(counts(state["size"]), dtype, chunks)


def _require(kind: type[T], found: object) -> T:
    if not isinstance(found, kind):
        raise BadCheckpoint(f"expected {kind.__name__.strip('_')}, got {type(found).__name__}")
    return found
