"""The compute-dtype copies that steps of our AdamW write for the gathers after them."""

from __future__ import annotations

import inspect
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
    units: dict[Unit, bool] = {}
    shards: dict[Tensor, Tensor] = {}
    for unit, run in runs:
        shard = unit.compute_shard(run)
        if shard is not None and units.setdefault(unit, unit.holds_casts):
            shards[run.param] = shard
    optimizer.compute_shards = ComputeShards(shards)
    return [unit for unit, is_lent in units.items() if is_lent]


def take_copies_back(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
    """After the step, when all units were marked stale: what `lend_copies` gave was written."""
    if not isinstance(optimizer, AdamW):
        return
    shards, optimizer.compute_shards = optimizer.compute_shards, None
    if shards is not None and shards.written:
        for unit in units:
            unit.mark_cast()
