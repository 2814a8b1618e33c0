"""Weights of a model, sharded or plain, to safetensors files in the layout of Hugging Face.

Rank 0 writes, piece by piece, as the ranks gather them: no tensor is ever whole in memory.
`folder` says how the files get their names when all are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ..arguments import require_number
from ..checkpoint import folder as checkpoint_folder
from ..checkpoint.agreement import Alike
from ..checkpoint.ranks import claim, ranks_of
from ..collectives import start_all_gather
from ..errors import communicating
from ..messages import room_in
from ..modules.uncompiled import uncompiled
from ..tensor.sharded_tensor import ShardedTensor
from ..untrusted import shown
from .files import CHUNK_BYTES, Staging
from .folder import ExportFolder
from .format import FileTensor, TensorSpec, plan_export
from .state import ModuleState, tensors_of

_CASTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LEAST_NUMEL = 2**16
"""What a gather takes of each rank at least, so that many ranks do not mean many gathers."""


@torch.no_grad()
@uncompiled
def save_safetensors(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    max_shard_bytes: float = 5 * 10**9,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the parameters and persistent buffers of `module`, sharded or plain, to `path`.

    `path` is a folder: it gets `model.safetensors`, or, where that would have more than
    `max_shard_bytes` bytes of tensors, `model-00001-of-0000N.safetensors` and so on with
    `model.safetensors.index.json`, as `from_pretrained` of transformers reads them. An export that
    is there is replaced once the new one is complete; other files stay. Floating tensors are
    converted to `dtype` (float64, float32, float16, bfloat16) if one is given, else stored as the
    module has them, which for sharded parameters is the main dtype. Tied tensors are stored once,
    under their first name.

    A collective over the ranks that `module` is sharded over (all ranks if it is not); the first of
    them writes. Memory: a few tens of MiB, for any model.

    Raises:
        FileExistsError: `path` is no folder.
        OSError: the folder cannot be written to, or the disk is full; raised on every rank.
        TypeError: an argument of the wrong type.
        ValueError: the module has extra state or tensors that the format cannot store, which are
            named; a bad option; ranks pass different arguments or modules.
        RuntimeError: parameters are whole, inside `gathered`, or were added after `fully_shard`.
            Whatever is raised, the export that was at `path` stays.
    """
    ranks = ranks_of(module)
    with Alike(ranks) as alike:
        _check_options(max_shard_bytes, dtype)
        state = tensors_of(module, "save_safetensors")
        _require_storable(state)
        entries = {entry.names[0]: entry.tensor for entry in state.entries}
        specs = [
            TensorSpec(name, _stored_dtype(tensor, dtype), tuple(tensor.shape))
            for name, tensor in entries.items()
        ]
        export = plan_export(specs, max_shard_bytes)
        target = checkpoint_folder.resolve_path(path)
        alike.tell("path", target.name, str(target))
        alike.tell("dtype", str(dtype))
        alike.tell("max_shard_bytes", str(max_shard_bytes))
        tensors = f"{len(specs)} tensors of {sum(spec.nbytes for spec in specs)} bytes"
        alike.tell("module", hashlib.sha256(repr(specs).encode()).hexdigest(), tensors)
    with Alike(ranks):
        if ranks.leads:
            claim(target, ranks)  # first: what another model writes there is not ours to discard
    folder = ExportFolder(target, export) if ranks.leads else None
    try:
        with Alike(ranks):
            staging = Staging()
            gathering = _Gathering(
                (tensor, _stored_dtype(tensor, dtype))
                for tensor in entries.values()
                if _lies_in_parts(tensor)
            )
            if folder is not None:
                folder.prepare()
        for file in export.files:
            # A file at a time: where rank 0 cannot write, nobody gathers the rest.
            partial = None if folder is None else folder.partial(file.name)
            with Alike(ranks), _Sink(partial, file.header, staging) as sink:
                for name, stored in file.tensors.items():
                    _write(entries[name], stored, sink, gathering)
        with Alike(ranks):
            if folder is not None:
                folder.publish()
    finally:
        if folder is not None:
            folder.discard_partials()


def _check_options(max_shard_bytes: object, dtype: object) -> None:
    require_number("max_shard_bytes", max_shard_bytes, "a number of bytes >= 1", lambda n: n >= 1)
    if dtype is not None and dtype not in _CASTS:
        raise TypeError(
            f"dtype: expected None or one of {', '.join(map(str, _CASTS))}, got {dtype!r}"
        )


def _require_storable(state: ModuleState) -> None:
    if state.unstorable:
        names = "\n  ".join(f"{shown(name)}: {why}" for name, why in state.unstorable.items())
        raise ValueError(
            "module: expected parameters and buffers, which is all that safetensors can hold, got "
            f"besides:\n  {names}\nExport the parts of the module without it, each to a folder of "
            "its own, take it out of the module meanwhile, or use save_checkpoint, which keeps "
            "extra state"
        )


def _stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _lies_in_parts(tensor: Tensor) -> TypeGuard[ShardedTensor]:
    return isinstance(tensor, ShardedTensor) and not tensor.is_whole


def _write(tensor: Tensor, stored: FileTensor, sink: _Sink, gathering: _Gathering) -> None:
    """Have `sink` write the whole `tensor`, from all ranks."""
    if _lies_in_parts(tensor):
        for start, piece in gathering.pieces(tensor, stored.dtype, sink):
            sink.write(piece, stored.dtype, stored.start + start * stored.dtype.itemsize)
    elif sink.writes:
        with sink.noting_errors():
            whole = tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach()
            sink.write(whole.reshape(-1), stored.dtype, stored.start)


class _Gathering:
    """Gathers sharded tensors in pieces, through memory that is allocated once: blocks that come
    and go leave gaps in the heap of a CPU, ten times as large.
    """

    def __init__(self, tensors: Iterable[tuple[ShardedTensor, torch.dtype]]) -> None:
        """Allocate what `tensors` need in the dtypes that they are gathered in."""
        nbytes: dict[torch.device, int] = {}
        for tensor, dtype in tensors:
            world_size, longest, most = _extent(tensor, dtype)
            needed = (world_size + 1) * min(most, longest) * dtype.itemsize
            nbytes[tensor.device] = max(needed, nbytes.get(tensor.device, 0))
        self._memory = {
            device: torch.empty(count, dtype=torch.uint8, device=device)
            for device, count in nbytes.items()
        }

    def pieces(
        self, tensor: ShardedTensor, dtype: torch.dtype, sink: _Sink
    ) -> Iterator[tuple[int, Tensor]]:
        """The whole tensor: where each piece starts and its elements [n], valid until the next (a
        collective). What fails on this rank alone is noted in `sink`.

        A gather takes some elements of every rank's share, so that pieces come from as many places
        of the tensor as there are ranks.
        """
        world_size, longest, most = _extent(tensor, dtype)
        for done in range(0, longest, most):
            count = min(most, longest - done)
            nbytes = count * dtype.itemsize
            memory = self._memory[tensor.device]
            part, parts = memory[:nbytes], memory[nbytes : (world_size + 1) * nbytes]
            with sink.noting_errors():
                own = tensor.share[done : done + count]
                part.view(dtype)[: own.numel()].copy_(own)
            what = f"gather of parameter {tensor.name!r}"
            with communicating(what):
                start_all_gather(tensor.communicator, parts, part, what).wait()
            received = parts.view(dtype).view(world_size, count)
            for (start, stop), values in zip(tensor.shares, received, strict=True):
                if start + done < stop:
                    yield start + done, values[: stop - start - done]


def _extent(tensor: ShardedTensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Ranks, elements of the longest share, and how many of it one gather takes."""
    world_size = len(tensor.shares)
    longest = max(stop - start for start, stop in tensor.shares)
    return world_size, longest, max(_LEAST_NUMEL, CHUNK_BYTES // (dtype.itemsize * world_size))


class _Sink:
    """A new file that tensors are written to; on disk when the block ends.

    Without a path it takes everything and writes nothing. What fails is raised when the block ends:
    the other ranks go on gathering until then, and this one with them.
    """

    def __init__(self, path: Path | None, header: bytes, staging: Staging) -> None:
        self.writes = path is not None
        self._path = path
        self._header = header
        self._descriptor: int | None = None
        self._error: Exception | None = None
        self._staging = staging

    def __enter__(self) -> _Sink:
        if self._path is not None:
            with self.noting_errors():
                # Exclusively: a link that somebody planted under this name is not followed.
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o666)
                self._write_bytes(memoryview(self._header), 0)
        return self

    def write(self, values: Tensor, dtype: torch.dtype, position: int) -> None:
        """Write `values` [n], of any device and dtype, as `dtype` from byte `position` on."""
        if not self.writes or self._error is not None:
            return
        with self.noting_errors():
            for start, count in self._staging.pieces(0, len(values), dtype):
                self._staging.elements(count, dtype).copy_(values[start : start + count])
                memory = self._staging.first(count * dtype.itemsize)
                self._write_bytes(memory, position + start * dtype.itemsize)

    def _write_bytes(self, memory: memoryview, position: int) -> None:
        assert self._descriptor is not None
        while memory:
            count = os.pwrite(self._descriptor, memory, position)
            memory, position = memory[count:], position + count

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._descriptor is not None:
            with self.noting_errors():
                try:
                    os.fsync(self._descriptor)
                finally:
                    os.close(self._descriptor)
        if self._error is None or kind is not None:
            return
        if isinstance(self._error, OSError) and self._path is not None:
            raise OSError(
                f"path: expected room for the export, got {self._error.strerror} with "
                f"{room_in(self._path.parent)}. Nothing was replaced"
            ) from self._error
        raise self._error

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Keep an error of the block until all is gathered."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised when the file ends
            self._error = self._error or error
