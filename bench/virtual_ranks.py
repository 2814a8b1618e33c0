"""A sharded training of ranks that are not there: this process is rank 0, on the streams of a
machine, and in its groups all ranks hold alike.

stream     0          1              2
carries    compute    gather lane    reduce lane, or its even works (pipelined: the odd ones on 3)
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..sharding import build, runtime
from ..sharding.collectives import Collectives
from ..sharding.data_parallel_groups import Axis, DataParallelGroups
from ..sharding.expert_ranks import ModelRanks
from ..sharding.fully_shard import fully_shard
from ..sharding.lanes import Lane, StreamLane
from .virtual_streams import LoopbackGroup, Machine

Along = list[tuple[LoopbackGroup, ...]]
"""The group for gathers and that for reductions, along each axis."""
Lanes = Callable[[torch.device], tuple[Lane, Lane]]
"""Makes the lane of gathers and that of reductions."""


def lanes_in_order(device: torch.device) -> tuple[Lane, Lane]:
    """Those of a GPU by default."""
    return StreamLane(device), StreamLane(device)


def groups_over(
    axes: Sequence[Axis], group: Any, device: torch.device, rank: int = 0
) -> DataParallelGroups:
    """All ranks along `axes`, in `group`."""
    places = tuple(itertools.product(*(range(axis.size) for axis in axes)))
    return DataParallelGroups(rank, len(places), device, group, tuple(axes), places)


@contextlib.contextmanager
def virtual_ranks(machine: Machine, lanes: Lanes, sizes: Sequence[int]) -> Iterator[Along]:
    """A model made inside has `lanes`, and axes of `sizes` along which all ranks are alike. Delete
    the model inside.
    """
    groups, along = _groups(machine, sizes)

    def do_nothing(*_: object) -> None:
        """No mock: it would keep the tensors that it was called with."""

    entry = sys.modules[fully_shard.__module__]
    with (
        machine.installed(),
        _making(lanes, groups.device),
        mock.patch.multiple(
            entry, model_ranks=lambda *_, **__: _alike(groups), require_mesh=lambda *_: None
        ),
        mock.patch.object(runtime, "make_watch", lambda *_, **__: None),
        mock.patch.multiple(Collectives, broadcast=do_nothing, all_reduce=do_nothing),
        mock.patch.multiple(dist, get_backend=lambda _: "nccl", get_rank=lambda _: 0),
    ):
        yield along


@contextlib.contextmanager
def _making(lanes: Lanes, device: torch.device) -> Iterator[None]:
    made = iter(lanes(device))
    with mock.patch.object(build, "make_lane", lambda *_: next(made)):
        yield


def _alike(groups: DataParallelGroups) -> ModelRanks:
    one = Collectives(groups)
    return ModelRanks(one, one)


def _groups(machine: Machine, sizes: Sequence[int]) -> tuple[DataParallelGroups, Along]:
    along: Along = [tuple(LoopbackGroup(machine, size) for _ in range(2)) for size in sizes]
    # As everywhere, an axis of one rank has no communicators.
    axes = tuple(
        Axis(f"axis {place}", range(size), 0, *(pair if size > 1 else (None, None)))
        for place, (size, pair) in enumerate(zip(sizes, along, strict=True))
    )
    group = LoopbackGroup(machine, math.prod(sizes))
    return groups_over(axes, group, torch.device("cpu")), along
