"""Ranks that are not there: a process group of one process, and functions of the bench in the
place of its collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore

# Of each pair the first from torch 2.13 on, the second before.
ALL_GATHERS = ("all_gather_single", "_allgather_base")
EXCHANGES = ("alltoall_base", "reduce_scatter_single", "_reduce_scatter_base")


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `world` ranks in torch's "fake" group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ended_work() -> dist.Work:
    """What a collective returns that has ended."""
    future: Future[list[Tensor]] = Future()
    future.set_result([])
    work: dist.Work = c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


@contextmanager
def stand_in_for(methods: Sequence[str], function: Callable[..., dist.Work]) -> Iterator[None]:
    """Inside, `function(group, output, input, ...)` is those of `methods` that `dist.ProcessGroup`
    has, for all groups.
    """
    known = [name for name in methods if hasattr(dist.ProcessGroup, name)]
    originals: dict[str, Any] = {name: getattr(dist.ProcessGroup, name) for name in known}
    for name in known:
        setattr(dist.ProcessGroup, name, function)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)
