"""Symmetric memory on a CPU: files that all ranks of a machine map, and a collective to meet."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.sharding import peer_memory
from sidestream.sharding.peer_memory import Reach

_NAN = 0xFF  # in every byte: NaN in each dtype that travels
_PATHS: dict[int, Path] = {}


def _mapped(path: Path, nbytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def allocate(nbytes: int, device: torch.device) -> Tensor:
    assert device.type == "cpu"
    number, name = tempfile.mkstemp(prefix="sidestream-shared-")
    os.close(number)
    own = _mapped(Path(name), nbytes).fill_(_NAN)
    _PATHS[own.data_ptr()] = Path(name)
    return own


class FileMemory:
    """In place of `CudaMemory`."""

    def __init__(self, own: Tensor, group: dist.ProcessGroup) -> None:
        path, self._group = _PATHS.pop(own.data_ptr()), group
        paths = [path] * group.size()
        dist.all_gather_object(paths, path, group=group)
        self.buffers = [own if other == path else _mapped(other, own.numel()) for other in paths]
        dist.barrier(group)
        path.unlink()

    def meet(self, channel: int) -> dist.Work | None:
        return dist.barrier(self._group, async_op=True)


def reach_of(_device: torch.device) -> Reach:
    """As of one machine where each rank has a GPU."""
    gpus = [f"GPU {rank}" for rank in range(dist.get_world_size())]
    return Reach("machine", gpus[dist.get_rank()], frozenset(gpus))


@contextmanager
def sharing(**replaced: object) -> Iterator[None]:
    """Ranks inside can read each other's memory. `replaced`: of what stands for torch's."""
    fakes = {"allocate": allocate, "CudaMemory": FileMemory, "reach_of": reach_of, **replaced}
    with mock.patch.multiple(peer_memory, **fakes):
        yield
