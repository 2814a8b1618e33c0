"""What ranks say of their GPUs, whether they can read each other's memory; torch's interface."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from sidestream.sharding import peer_memory
from sidestream.sharding.peer_memory import CudaMemory, Reach, allocate, obstacle, reach_of

GPUS = frozenset({"a", "b", "c", "d"})


def on(gpu: str, host: str = "h", reads: frozenset[str] = GPUS, lack: str = "") -> Reach:
    return Reach(host, gpu, reads, lack)


CASES: dict[str, tuple[dict[int, Reach], str]] = {
    "all can": ({0: on("a"), 1: on("b"), 2: on("c")}, ""),
    "one rank": ({3: on("a", reads=frozenset())}, ""),
    "CPU": ({0: on("a"), 2: on("", lack="the model is on the CPU")}, "on rank 2 the model is on"),
    "two machines": ({0: on("a"), 8: on("b", host="i")}, "ranks 0 and 8 are on two machines"),
    "a GPU for two": ({0: on("a"), 1: on("b"), 3: on("b")}, "ranks 1 and 3 share a GPU"),
    "no way": (
        {0: on("a"), 1: on("b", reads=frozenset("b"))},
        "the GPU of rank 1 cannot read the memory of rank 0's, or its process does not see it",
    ),
}


@pytest.mark.parametrize(("reaches", "why"), CASES.values(), ids=CASES)
def test_why_ranks_cannot_read_each_others_memory(reaches: dict[int, Reach], why: str) -> None:
    found = obstacle(reaches)
    assert found == why if not why else found.startswith(why)


def test_a_cpu_says_so() -> None:
    found = reach_of(torch.device("cpu"))
    assert found.lack == "the model is on the CPU" and found.host


@pytest.mark.parametrize("backend", [None, "NVSHMEM", "CUDA"], ids=str)
def test_what_a_gpu_says_of_itself(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 1 of three, of which the last is behind another bridge."""

    class Torch:
        get_backend = staticmethod(lambda _: backend)

    class Properties:
        def __init__(self, number: int) -> None:
            self.uuid = "abc"[number]

    monkeypatch.setattr(peer_memory, "_SymmetricMemory", Torch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, peer: peer.index != 2)
    found = reach_of(torch.device("cuda", 1))
    if backend == "CUDA":
        assert (found.gpu, found.reads, found.lack) == ("b", frozenset("a"), "")
    else:
        assert ("TORCH_SYMMMEM=CUDA" in found.lack) == (backend is not None)
        assert found.lack


# ---- torch's interface

PARTS = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)


class Group:
    """Of three ranks, whose collectives may take two seconds."""

    group_name = "three"
    _device_types = (torch.device("cuda"),)

    def _get_backend(self, _device: torch.device) -> Any:
        class Options:
            _timeout = timedelta(seconds=2)

        class Backend:
            options = Options

        return Backend


class Handle:
    """Torch's, as rank 1 has it."""

    rank, world_size = 1, 3

    def __init__(self) -> None:
        self.met: list[tuple[int, int]] = []

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        assert rank != self.rank
        return PARTS[rank][: sizes[0]].view(dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.met.append((channel, timeout_ms))


def test_parts_of_all_ranks_are_mapped_and_meetings_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = Handle()

    class Torch:
        empty_strided_p2p = staticmethod(
            lambda size, stride, dtype, device: PARTS[1].as_strided(size, stride).view(dtype)
        )
        rendezvous = staticmethod(lambda own, group: {"three": handle}[group])

    monkeypatch.setattr(peer_memory, "_SymmetricMemory", Torch)
    own = allocate(64, torch.device("cuda"))
    memory = CudaMemory(own, Group())  # type: ignore[arg-type]
    assert memory.buffers[1] is own
    assert torch.equal(torch.stack([*memory.buffers]), PARTS)
    assert memory.meet(1) is None
    assert handle.met == [(1, 2000)]


def test_the_torch_that_is_installed_has_what_is_called() -> None:
    taken = {
        "empty_strided_p2p": ("size", "stride", "dtype", "device"),
        "rendezvous": ("tensor", "group_name"),
        "get_backend": (),
        "get_buffer": ("rank", "sizes", "dtype"),
        "barrier": ("channel", "timeout_ms"),
    }
    for name, arguments in taken.items():
        described = getattr(_SymmetricMemory, name).__doc__
        places = [described.index(f"{argument}: ") for argument in arguments]
        assert places == sorted(places), described
