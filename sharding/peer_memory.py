"""Memory that every rank along an axis reads where it lies: torch's symmetric memory on CUDA.

    reach_of    what this rank's GPU can read of others; `obstacle` decides for ranks together
    allocate    this rank's part
    CudaMemory  the parts of all, which is a collective, and a barrier between their streams

The only file that names torch's interface. Each allocation is one of the driver's, made for its
purpose: torch's pool of them would hand out memory again that other ranks still know by its old
owner.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from .monitor import time_limit_s

_BACKEND = "CUDA"
"""That of torch's which has a barrier between streams; NVSHMEM's and NCCL's have none in torch 2.11
to 2.14.
"""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class PeerMemory(Protocol):
    """What ranks share."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Every rank's part, [nbytes] bytes each, in the order of ranks: this rank writes its own
        and reads all.
        """

    def meet(self, channel: int) -> dist.Work | None:
        """What follows on the current stream comes after all that every rank's streams held when it
        called this as often for `channel`. A work to wait for, where no stream counts.
        """


@dataclass(frozen=True, slots=True)
class Reach:
    """What one rank says of its GPU. `host`: of the machine, since it was booted. `gpu`: its own
    number in the world. `reads`: GPUs whose memory it can read. `lack`: what is missing here,
    whoever the others are; empty if nothing is.
    """

    host: str
    gpu: str
    reads: frozenset[str]
    lack: str = ""


def reach_of(device: torch.device) -> Reach:
    """This rank's. Asks the driver; communicates with nobody."""
    host = f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"
    if device.type != "cuda":
        return Reach(host, "", frozenset(), "the model is on the CPU")
    backend = _SymmetricMemory.get_backend(device)
    if backend != _BACKEND:
        return Reach(host, "", frozenset(), _other_backend(backend))
    own = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    others = [number for number in range(torch.cuda.device_count()) if number != own.index]
    readable = [
        n for n in others if torch.cuda.can_device_access_peer(own, torch.device("cuda", n))
    ]
    return Reach(host, _number(own.index), frozenset(map(_number, readable)))


def _other_backend(backend: str | None) -> str:
    if backend is None:
        return "this torch has no symmetric memory for GPUs"
    return (
        f"torch's symmetric memory goes by {backend}, which has no barrier between streams; set "
        f"TORCH_SYMMMEM={_BACKEND}"
    )


def _number(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def obstacle(reaches: Mapping[int, Reach]) -> str:
    """Why ranks, by their numbers, cannot all read each other's memory; empty if they can."""
    for rank, reach in reaches.items():
        if reach.lack:
            return f"on rank {rank} {reach.lack}"
    first, expected = next(iter(reaches.items()))
    for rank, reach in reaches.items():
        if reach.host != expected.host:
            return f"ranks {first} and {rank} are on two machines"
    owners: dict[str, int] = {}
    for rank, reach in reaches.items():
        if owners.setdefault(reach.gpu, rank) != rank:
            return f"ranks {owners[reach.gpu]} and {rank} share a GPU"
    for rank, reach in reaches.items():
        if hidden := [owners[gpu] for gpu in owners if gpu not in {reach.gpu, *reach.reads}]:
            return (
                f"the GPU of rank {rank} cannot read the memory of rank {hidden[0]}'s, or its "
                "process does not see it (CUDA_VISIBLE_DEVICES)"
            )
    return ""


def allocate(nbytes: int, device: torch.device) -> Tensor:
    """This rank's part [nbytes] of bytes, with any contents.

    Raises:
        RuntimeError: there is not so much memory, or the driver shares none.
    """
    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


class CudaMemory:
    """The parts that the ranks of `group` have allocated, equally large, mapped into this process.

    The barrier is a kernel of one block on the current stream, so the host goes on. A rank that has
    waited in it for the group's time limit ends with an error of its GPU.
    """

    def __init__(self, own: Tensor, group: dist.ProcessGroup) -> None:
        """A collective of `group`; raises `RuntimeError` where ranks cannot map a part."""
        self._handle = _SymmetricMemory.rendezvous(own, group.group_name)
        self._limit_ms = int(1000 * (time_limit_s(group) or 0))  # 0: for ever
        self.buffers = [
            own
            if rank == self._handle.rank
            else self._handle.get_buffer(rank, own.shape, own.dtype)
            for rank in range(self._handle.world_size)
        ]

    def meet(self, channel: int) -> dist.Work | None:
        """See `PeerMemory`."""
        self._handle.barrier(channel, self._limit_ms)
        return None
