"""Pools of NCCL's memory: what is registered when, on fakes; on a GPU, that a collective runs."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sidestream.sharding.nccl_allocator import nccl_mem_pool
from sidestream.tests.ranks import run_on_ranks

Log = list[tuple[str, ...]]


class Backend:
    """As torch's: a pool is noted before what is in it is registered."""

    def __init__(self, name: str, log: Log, fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails
        self.noted: list[object] = []

    @property
    def mem_allocator(self) -> str:
        if self.fails == "allocator":
            raise RuntimeError("not supported in this NCCL version")
        return f"allocator of {self.name}"

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        assert pool not in self.noted, "registered twice"
        self.noted.append(pool)
        self.log.append((f"register{' symm' if symm else ''}", self.name, pool.name))
        if self.fails == "register":
            raise dist.DistBackendError("communicator has not been initialized")

    def deregister_mem_pool(self, pool: Any) -> None:
        if pool not in self.noted:
            raise RuntimeError("Trying to unregister not previously registered pool")
        self.noted.remove(pool)
        self.log.append(("deregister", self.name, pool.name))
        if self.fails == "deregister":
            raise RuntimeError("could not find handle")


class OldBackend(Backend):
    def register_mem_pool(self, pool: Any) -> None:  # type: ignore[override]
        raise AssertionError("registered without a window")


class Group:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        assert device == torch.device("cuda", 1)
        return self.backend


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log: Log = []

    class MemPool:
        made = 0

        def __init__(self, allocator: str) -> None:
            MemPool.made += 1
            self.name = f"pool {MemPool.made}"
            log.append(("make", allocator))

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device: torch.device) -> Iterator[None]:
        log.append(("allocate from", pool.name))
        try:
            yield
        finally:
            log.append(("allocate as before", pool.name))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    return log


def test_memory_is_registered_with_every_group_after_the_block_and_until_closed(log: Log) -> None:
    environment = dict(os.environ)
    first, second = Backend("dp", log), Backend("ep", log)
    pool = nccl_mem_pool(Group(first), Group(second), Group(first), symm=True)
    with pool:
        log.append(("block",))
    in_block = [("allocate from", "pool 1"), ("block",), ("allocate as before", "pool 1")]
    registrations = [("register symm", name, "pool 1") for name in ("dp", "ep")]
    ends = [("deregister", name, "pool 1") for name in ("ep", "dp")]
    assert log == [("make", "allocator of dp"), *in_block, *registrations]
    del log[:]
    with pool:
        log.append(("block",))
    pool.close()
    pool.close()
    assert log == [*ends, *in_block, *registrations, *ends]
    assert dict(os.environ) == environment


def test_an_exception_in_the_block_leaves_nothing_registered_and_the_pool_usable(log: Log) -> None:
    backend = Backend("dp", log)
    pool = nccl_mem_pool(Group(backend))
    with pool:
        pass
    with pytest.raises(KeyError), pool:
        raise KeyError
    assert not backend.noted
    assert log[-1] == ("allocate as before", "pool 1")
    with pool, pytest.raises(RuntimeError, match="one block at a time"), pool:
        pass
    assert log[-1] == ("register", "dp", "pool 1")
    assert len(backend.noted) == 1


def test_two_pools_are_apart(log: Log) -> None:
    backend = Backend("dp", log)
    pools = [nccl_mem_pool(Group(backend)) for _ in range(2)]
    with pools[0], pools[1]:
        pass
    assert len(backend.noted) == 2
    pools[0].close()
    assert [pool.name for pool in backend.noted] == ["pool 2"]


@pytest.mark.parametrize(
    ("failing", "symm", "expected"),
    [
        (lambda log: Backend("ep", log, "register"), False, "not been initialized.*device_id"),
        (lambda log: OldBackend("ep", log), True, "TypeError.*symm=False where torch"),
    ],
    ids=["no communicator", "no windows"],
)
def test_a_registration_that_fails_leaves_none(
    failing: Callable[[Log], Backend], symm: bool, expected: str, log: Log
) -> None:
    backends = [Backend("dp", log), failing(log), Backend("tp", log)]
    pool = nccl_mem_pool(*map(Group, backends), symm=symm)
    with pytest.raises(RuntimeError, match=f"{expected}.*Nothing is registered"), pool:
        pass
    assert not any(backend.noted for backend in backends)
    assert ("register", "tp", "pool 1") not in log


def test_an_interrupted_registration_leaves_none(log: Log) -> None:
    class Interrupted(Backend):
        def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
            super().register_mem_pool(pool, symm)
            raise KeyboardInterrupt

    backends = [Backend("dp", log), Interrupted("ep", log)]
    pool = nccl_mem_pool(*map(Group, backends))
    with pytest.raises(KeyboardInterrupt), pool:
        pass
    assert not any(backend.noted for backend in backends)


def test_all_registrations_end_where_one_cannot(log: Log) -> None:
    backends = [Backend("dp", log), Backend("ep", log, "deregister"), Backend("tp", log)]
    pool = nccl_mem_pool(*map(Group, backends))
    with pool:
        pass
    with pytest.raises(RuntimeError, match="could not find handle"):
        pool.close()
    assert not any(backend.noted for backend in backends)


def test_refuses_what_nccl_cannot_do(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pass at least one"):
        nccl_mem_pool()
    for what in (None, dist.GroupMember.NON_GROUP_MEMBER, [Group(Backend("dp", log))], "dp", True):
        with pytest.raises(TypeError, match=r"process groups that this rank is in.*one by one"):
            nccl_mem_pool(what)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="symm: expected True or False, got 'no'"):
        nccl_mem_pool(Group(Backend("dp", log)), symm="no")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"allocator \(2.19\), got not supported.*update it"):
        nccl_mem_pool(Group(Backend("dp", log, "allocator")))
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    with pytest.raises(ValueError, match=r"got one of gloo, which registers no memory.*leave"):
        nccl_mem_pool(Group(object()))
    assert log == []


def _on_a_cpu(rank: int, world_size: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        nccl_mem_pool(dist.group.WORLD)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_a_cpu() -> None:
    [message] = run_on_ranks(_on_a_cpu, 1)
    assert "expected a GPU, got none that torch sees" in message
    assert "leave it out on a CPU" in message


def _sums(rank: int, world_size: int, folder: str) -> list[float]:
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/r", rank=0, world_size=1, device_id=device
    )
    sums = []
    for value, symm in ((1.0, False), (2.0, True)):
        pool = nccl_mem_pool(dist.group.WORLD, symm=symm)
        with pool:
            buffer = torch.full((1 << 20,), value, device=device)
        dist.all_reduce(buffer)
        sums.append(float(buffer.sum()))
        pool.close()
        dist.all_reduce(buffer)
    return sums


@pytest.mark.gpu
def test_a_collective_of_nccl_runs_on_registered_memory(tmp_path: Any) -> None:
    [sums] = run_on_ranks(_sums, 1, str(tmp_path), backend=None)
    assert sums == [float(1 << 20), float(2 << 20)]
