"""The compute-dtype copies that steps of our AdamW write for the gathers after them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..optimizer_view import FlatRun
from ..unit import Unit
from .adamw import AdamW, ComputeShards


def lend_copies(
    optimizer: torch.optim.Optimizer, runs: Iterable[tuple[Unit, FlatRun]]
) -> list[Unit]:
    """Before a step over `runs`: have it write those copies that are right as they are; the units
    that they belong to.

    None unless the step is that of `AdamW` itself: a subclass may change parameters after it.
    """
    if not isinstance(optimizer, AdamW):
        return []
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(AdamW.step):
        return []
    units: list[Unit] = []
    shards: dict[Tensor, Tensor] = {}
    for unit, its_runs in itertools.groupby(runs, lambda pair: pair[0]):
        if unit.holds_casts:
            units.append(unit)
            shards |= {run.param: unit.compute_shard(run) for _, run in its_runs}
    optimizer.compute_shards = ComputeShards(shards)
    return units


def take_copies_back(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
    """After the step, when all units were marked stale: what `lend_copies` gave was written."""
    if not isinstance(optimizer, AdamW):
        return
    shards, optimizer.compute_shards = optimizer.compute_shards, None
    if shards is not None and shards.written:
        for unit in units:
            unit.mark_cast()
