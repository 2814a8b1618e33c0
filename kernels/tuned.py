"""The tables of tuned launch configurations: which holds on a device, and what it may say.

`sidestream autotune` writes them. Nothing is tuned at run time: a table is read once per device,
when a kernel is first launched there or a model sharded. Entry by entry the later of these wins:

    package   kernels/tuned/<device>.json
    user      sidestream/tuned/<device>.json in $XDG_CONFIG_HOME, or in ~/.config
    variable  $SIDESTREAM_TUNED: a file, or a folder with <device>.json

    {"schema_version": 1, "kind": "tuned", "device": "NVIDIA H200", "triton": "3.6.0", ...,
     "entries": [{"op": "pack_", "case": "bf16", "block_bytes": 8192, "num_warps": 8, ...}, ...]}

<device> is the GPU's name in lower case, `nvidia_h200`. A file that is damaged, for another version
or device, or that has an illegal entry, is left out as a whole, with one warning. What no entry is
for is launched by its default, as is all on a CPU, where the interpreter runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .launch import LaunchConfig

SCHEMA_VERSION = 1
KIND = "tuned"
VARIABLE = "SIDESTREAM_TUNED"
PACKAGE_FOLDER = Path(__file__).with_suffix("")
MAX_WARPS = 16
_MAX_FILE_BYTES = 16 * 1024 * 1024
_REDO = "run `sidestream autotune` again"

Key = tuple[str, str]
"""An op, and which of its cases: what its launcher looks for."""

_logger = logging.getLogger("sidestream")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a table may say of an op: how many bytes a block has, equal where they are fixed."""

    min_block_bytes: int
    max_block_bytes: int


# What a block is of stands in each launcher. Tiles of the norm and of MX formats have one size, so
# that only warps may be tuned there.
LIMITS: Mapping[str, Limits] = MappingProxyType(
    {
        "pack_": Limits(1024, 65536),
        "unpack_": Limits(1024, 65536),
        "reduce_": Limits(512, 32768),
        "cast_": Limits(512, 32768),
        "cast_back_": Limits(512, 32768),
        "quantize_fp8_": Limits(1024, 16384),
        "dequantize_fp8_": Limits(1024, 16384),
        "quantize_mx_": Limits(4096, 4096),
        "dequantize_mx_": Limits(4096, 4096),
        "amax_nvfp4_": Limits(1024, 32768),
        "quantize_nvfp4_": Limits(1024, 16384),
        "dequantize_nvfp4_": Limits(1024, 16384),
        "hadamard16_": Limits(1024, 65536),
        # Rows of up to 4096 elements lie in one tile.
        "pack_message_": Limits(4096, 16384),
        "unpack_message_": Limits(4096, 16384),
        "reduce_messages_": Limits(512, 16384),
        "reduce_peer_messages_": Limits(512, 16384),
        "flat_adamw_": Limits(512, 16384),
        "flat_sgd_": Limits(512, 16384),
        "l2_norm_": Limits(65536, 65536),
    }
)


class TableError(ValueError):
    """Why a file cannot be used."""


@dataclass(frozen=True, slots=True)
class Table:
    """What holds on one device. sources: the files it comes from."""

    entries: Mapping[Key, LaunchConfig] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Of the entries alone; the same in every process."""
        rows = sorted(
            (*key, config.block_bytes, config.num_warps) for key, config in self.entries.items()
        )
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """For a person who compares it with another one."""
        if not self.sources:
            return "no tuned table"
        return f"{', '.join(self.sources)} ({len(self.entries)} entries, {self.digest})"


def config_for(op: str, case: str, default: LaunchConfig, device: torch.device) -> LaunchConfig:
    """How `op` is launched on `device` for the arguments that `case` stands for."""
    if op in _forced:
        _forced[op].asked[case] = default
        return _forced[op].config
    if device.type != "cuda":
        return default
    return table_of(device).entries.get((op, case), default)


@functools.cache
def table_of(device: torch.device) -> Table:
    """The table that holds on `device`, read when it is first asked for; a CPU's is empty."""
    name = device_name(device)
    return Table() if name is None else load_table(name, triton_version())


class Fingerprint(NamedTuple):
    """What tells the launches of one process from those of another: `words` for a person."""

    digest: str
    words: str


def fingerprint(device: torch.device) -> Fingerprint:
    """Of how kernels are launched on `device`: equal digests mean equal launches."""
    table = table_of(device)
    return Fingerprint(table.digest, table.describe())


def device_name(device: torch.device) -> str | None:
    """The name that tables of `device` bear; None where there are none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def triton_version() -> str:
    """Of the Triton that compiles here."""
    import triton

    return str(triton.__version__)


def file_name(name: str) -> str:
    """The name of the file for the device called `name`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + ".json"


def user_folder() -> Path:
    """Where this user's own tables lie."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "sidestream" / "tuned"


def load_table(name: str, triton: str) -> Table:
    """The table for the device called `name` and this version of Triton, from all places."""
    entries: dict[Key, LaunchConfig] = {}
    sources = []
    for path in paths_of(name):
        try:
            found = read_entries(path, name, triton)
        except TableError as error:
            _logger.warning("%s: not used, other tables and the defaults hold: %s", path, error)
        else:
            entries.update(found)
            sources.append(str(path))
    return Table(MappingProxyType(entries), tuple(sources))


def paths_of(name: str) -> list[Path]:
    """The files to read, the one that wins last; what the variable names may not be readable."""
    found = [
        folder / file_name(name)
        for folder in (PACKAGE_FOLDER, user_folder())
        if os.path.isfile(folder / file_name(name))  # Path.is_file raises where we may not look
    ]
    if variable := os.environ.get(VARIABLE):
        path = Path(variable)
        if not os.path.isdir(path):
            found.append(path)
        elif os.path.isfile(path / file_name(name)) or not os.access(path, os.X_OK):
            found.append(path / file_name(name))
    return found


def read_entries(path: Path, name: str, triton: str) -> dict[Key, LaunchConfig]:
    """The entries of one file, for the device called `name` and this version of Triton.

    Raises:
        TableError: they cannot be used; the text says why, and what to do.
    """
    document = read_document(path)
    _check_document(document, name, triton)
    entries: dict[Key, LaunchConfig] = {}
    for index, entry in enumerate(document["entries"]):
        key, config = _checked_entry(f"entries[{index}]", entry)
        if key in entries:
            raise TableError(f"entries[{index}]: expected each case once, got {key} again; {_REDO}")
        entries[key] = config
    return entries


def read_document(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `TableError` where there is none."""
    # A pipe would keep us until somebody writes to it.
    if os.path.exists(path) and not os.path.isfile(path):
        raise TableError(
            "expected a file to read, got a folder, a pipe or a device; correct the path"
        )
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise TableError(f"expected a table, got more than {_MAX_FILE_BYTES} bytes; {_REDO}")
        document = json.loads(text)
    except OSError as error:
        reason = f"expected a file to read, got {error.strerror}"
        raise TableError(f"{reason}; correct the path, or allow to read it") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"expected JSON, got a damaged file ({error}); {_REDO}") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise TableError(f"expected a document of kind {KIND!r}, got another one; {_REDO}")
    return document


def _check_document(document: Mapping[str, Any], name: str, triton: str) -> None:
    for field_name, expected in (("schema_version", SCHEMA_VERSION), ("device", name)):
        if document.get(field_name) != expected:
            raise TableError(
                f"{field_name}: expected {expected!r}, got {document.get(field_name)!r}; {_REDO}"
            )
    found = document.get("triton")
    if not isinstance(found, str) or found.split(".")[:2] != triton.split(".")[:2]:
        raise TableError(
            f"triton: expected {'.'.join(triton.split('.')[:2])}, got {found!r}; {_REDO}"
        )
    if not isinstance(document.get("entries"), list):
        raise TableError(f"entries: expected a list, got none; {_REDO}")


def _checked_entry(where: str, entry: Any) -> tuple[Key, LaunchConfig]:
    """The key and the configuration of an entry. Raises `TableError` for an illegal one."""
    values = entry if isinstance(entry, dict) else {}
    op, case = values.get("op"), values.get("case")
    block_bytes, num_warps = values.get("block_bytes"), values.get("num_warps")
    if not isinstance(op, str) or not isinstance(case, str):
        raise TableError(
            f"{where}: expected the names of an op and a case, got {entry!r:.80}; {_REDO}"
        )
    if type(block_bytes) is not int or type(num_warps) is not int:
        raise TableError(
            f"{where}: expected whole numbers, got {block_bytes!r} and {num_warps!r}; {_REDO}"
        )
    if op not in LIMITS:
        raise TableError(f"{where}: expected one of {', '.join(LIMITS)}, got op {op!r}; {_REDO}")
    try:
        config = LaunchConfig(block_bytes, num_warps)
    except ValueError as error:
        raise TableError(f"{where}: {error}") from None
    if reason := illegal(op, config):
        raise TableError(f"{where}: {reason}")
    return (op, case), config


def illegal(op: str, config: LaunchConfig) -> str | None:
    """Why `op` must not be launched with `config`; None where it may."""
    limits = LIMITS[op]
    if not limits.min_block_bytes <= config.block_bytes <= limits.max_block_bytes:
        return (
            f"block_bytes of {op}: expected {limits.min_block_bytes} to {limits.max_block_bytes}, "
            f"got {config.block_bytes}; choose a power of two in that range"
        )
    if config.num_warps > MAX_WARPS:
        return f"num_warps: expected at most {MAX_WARPS}, got {config.num_warps}; choose fewer"
    return None


@dataclass(frozen=True, slots=True)
class Forced:
    """One configuration for all launches of an op. asked: the cases launched, their defaults."""

    config: LaunchConfig
    asked: dict[str, LaunchConfig] = field(default_factory=dict)


_forced: dict[str, Forced] = {}


@contextlib.contextmanager
def forcing(op: str, config: LaunchConfig) -> Iterator[Forced]:
    """Launch `op` with `config`, whatever tables say: for the tuner and for tests.

    It holds for the whole process, so for one thread at a time. Raises `ValueError` for a
    configuration that is illegal for the op.
    """
    if reason := illegal(op, config):
        raise ValueError(reason)
    before = _forced.get(op)
    _forced[op] = forced = Forced(config)
    try:
        yield forced
    finally:
        if before is None:
            del _forced[op]
        else:
            _forced[op] = before
