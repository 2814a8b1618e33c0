"""Owns the steps of `make gpu-check` that train: one rank by the command line, and 2 and 4 ranks
that share the device. All are for right or wrong, so they run side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..training.result import parse_result
from .gpu_shared import TRAINING, TRYING
from .gpu_steps import (
    FAILED,
    NOT_RUN,
    OK,
    Budget,
    StepResult,
    module,
    sidestream,
    together,
    unfinished,
)

LIMIT_S = 75.0
SHARED_WORLDS = (2, 4)
# Losses of two runs that differ only in the order of some sums may differ by this much.
LOSS_TOLERANCE = 0.02


def trainings(budget: Budget, *, dry_run: bool) -> list[StepResult]:
    """Trainings of one rank at two levels and in bf16, whether they agree, and shared devices."""
    device = "cpu" if dry_run else "cuda"
    common = ["--nproc", "1", "--device", device]
    common += ["--model", "tiny", "--seq-len", "64"] if dry_run else []
    bf16 = ["--compute", "bf16", "--grad-wire", "bf16"]
    runs = {
        f"train 1 rank {device} ZeRO-0": [*common, "--zero", "0"],
        f"train 1 rank {device} ZeRO-3": [*common, "--zero", "3"],
        f"train 1 rank {device} ZeRO-3 bf16": [*common, "--zero", "3", *bf16],
    }
    steps = {name: partial(_training, budget, name, run) for name, run in runs.items()}
    for world in SHARED_WORLDS:
        name = f"{world} ranks share the {device}, gloo"
        steps[name] = partial(shared, budget, name, world, device)
    results = together(budget, steps)
    return [*results[:2], _same_training(results[0], results[1]), *results[2:]]


def _training(budget: Budget, name: str, arguments: Sequence[str]) -> StepResult:
    outcome = budget.run(sidestream("train", "--steps", "20", *arguments), limit_s=LIMIT_S)
    if late := unfinished(name, outcome):
        return late
    if outcome.code != 0:
        return StepResult(name, FAILED, outcome.seconds, outcome.tail)
    found: dict[str, Any] = parse_result(outcome.output)
    first, last = found["loss_first"], found["loss_last"]
    learnt = math.isfinite(last) and last < first
    return StepResult(
        name=name,
        status=OK if learnt else FAILED,
        seconds=outcome.seconds,
        detail=f"loss {first:.3f} -> {last:.3f}",
        values=found,
    )


def _same_training(first: StepResult, second: StepResult) -> StepResult:
    """Same data, seed and rank count at two ZeRO levels: same losses, and at best the same bits.

    The bits are reported and not demanded: attention's backward on a GPU may add in any order.
    """
    name = "ZeRO-0 and ZeRO-3 agree"
    if not (first.values and second.values):
        return StepResult(name, NOT_RUN, 0.0, "one of the two runs gave no result")
    losses = first.values["loss_last"], second.values["loss_last"]
    same_bits = first.values["params_sha256"] == second.values["params_sha256"]
    agree = abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * abs(losses[0])
    detail = f"losses {losses[0]:.4f}, {losses[1]:.4f}; same bits: {'yes' if same_bits else 'no'}"
    return StepResult(name, OK if agree else FAILED, 0.0, detail, values={"same_bits": same_bits})


def shared(budget: Budget, name: str, world: int, device: str) -> StepResult:
    """`world` ranks on one device, compared with plain PyTorch there."""
    command = [*module("gpu_shared"), "--world", str(world), "--device", device]
    outcome = budget.run(command, limit_s=LIMIT_S)
    if TRYING in outcome.output and TRAINING not in outcome.output:
        # Nothing of sidestream was called yet.
        detail = f"gloo does not take tensors of this {device}, {outcome.tail}"
        return StepResult(name, NOT_RUN, outcome.seconds, detail)
    if late := unfinished(name, outcome):
        return late
    if outcome.code != 0:
        return StepResult(name, FAILED, outcome.seconds, outcome.tail)
    found: dict[str, Any] = parse_result(outcome.output)
    levels = ", ".join(
        f"{level} {values['relative_difference']:.1e}" for level, values in found["levels"].items()
    )
    bits = "yes" if found["same_bits"] else "no"
    detail = f"weights off plain PyTorch's by {levels}; both levels the same bits: {bits}"
    return StepResult(name, OK, outcome.seconds, detail, found)
