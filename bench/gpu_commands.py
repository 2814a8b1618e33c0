"""The steps of `make gpu-check` that are commands of sidestream: trainings, a step beside FSDP2's,
an op tuned.

What a command found it writes with --json; in the table stand its own words.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..sharding.data_parallel_groups import ONE_RANK_VARIABLE
from ..training.launch.ranks import INIT_METHOD_VARIABLE
from .gpu_steps import FAILED, FILE, FOLDER, NOT_RUN, OK, Outcome, Result, Step, unfinished

AGREE, GROUP_AGREES = "ZeRO-0 and ZeRO-3 agree", "one rank and a group of one agree"
STEP, AUTOTUNE = "step time against FSDP2", "autotune of pack_"
TRAINING_LIMIT_S, STEP_LIMIT_S, AUTOTUNE_LIMIT_S = 75.0, 75.0, 60.0
# Losses of two runs that differ only in the order of some sums may differ by this much.
LOSS_TOLERANCE = 0.02
# As a launcher of one rank would say it; without the last, one rank needs no communication.
_GROUP_OF_ONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    INIT_METHOD_VARIABLE: f"file://{FOLDER}/rendezvous",
    ONE_RANK_VARIABLE: "1",
}


def _command(
    name: str,
    arguments: Sequence[str],
    limit_s: float,
    tell: Callable[[str, Mapping[str, Any]], Result],
    variables: Mapping[str, str] | None = None,
) -> Step:
    """tell: the result, from what the command said and what it found."""

    def judge(outcomes: Sequence[Outcome]) -> Result:
        (outcome,) = outcomes
        if late := unfinished(outcome):
            return late
        if outcome.code != 0 or outcome.written is None:
            return Result(FAILED, outcome.tail)
        return tell(outcome.output, json.loads(outcome.written))

    assert __package__
    package = __package__.rpartition(".")[0]
    command = [sys.executable, "-m", package, *arguments, "--json", FILE]
    return Step(name, [command], judge, limit_s, variables or {})


def _words(beginning: str) -> Callable[[str, Mapping[str, Any]], Result]:
    """Tells the lines that begin so."""

    def tell(output: str, found: Mapping[str, Any]) -> Result:
        lines = [line for line in output.splitlines() if line.startswith(beginning)]
        return Result(OK, "; ".join(" ".join(line.split()) for line in lines), found)

    return tell


def trainings(*, dry_run: bool) -> list[Step]:
    """Of one rank: at two levels, which are to agree; the second again over a group of that rank,
    by which its gathers and exchanges reach NCCL, to the same result; in bf16, and with messages of
    4 and 8 bits.
    """
    device = "cpu" if dry_run else "cuda"
    common = ["train", "--steps", "20", "--nproc", "1", "--device", device]
    common += ["--model", "tiny", "--seq-len", "64"] if dry_run else []
    zero3 = ["--zero", "3"]
    alone: dict[str, str] = {}
    kinds = {
        "ZeRO-0": (["--zero", "0"], alone),
        "ZeRO-3": (zero3, alone),
        "ZeRO-3 group": (zero3, _GROUP_OF_ONE),
        "ZeRO-3 bf16": ([*zero3, "--compute", "bf16", "--grad-wire", "bf16"], alone),
        "ZeRO-3 nvfp4": ([*zero3, "--grad-wire", "nvfp4", "--param-wire", "mxfp8"], _GROUP_OF_ONE),
    }
    return [
        _command(
            f"train 1 rank {device} {name}",
            [*common, *given],
            TRAINING_LIMIT_S,
            _trained,
            variables,
        )
        for name, (given, variables) in kinds.items()
    ]


def _trained(_: str, found: Mapping[str, Any]) -> Result:
    first, last = found["loss_first"], found["loss_last"]
    learnt = math.isfinite(last) and last < first
    detail = f"loss {first:.3f} -> {last:.3f}; peak {found['peak_mib']:.0f} MiB"
    if found["reserved_mib"] is not None:
        detail += f", {found['reserved_mib']:.0f} reserved"
    return Result(OK if learnt else FAILED, detail, found)


def same_training(first: Result, second: Result) -> Result:
    """Same data, seed and rank count, sharded differently: same losses, and at best the same bits.

    The bits are reported and not demanded: attention's backward on a GPU may add in any order.
    """
    if not (first.values and second.values):
        return Result(NOT_RUN, "one of the two runs gave no result")
    losses = first.values["loss_last"], second.values["loss_last"]
    same_bits = first.values["params_sha256"] == second.values["params_sha256"]
    agree = abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * abs(losses[0])
    detail = f"losses {losses[0]:.4f}, {losses[1]:.4f}; same bits: {'yes' if same_bits else 'no'}"
    return Result(OK if agree else FAILED, detail, {"same_bits": same_bits})


def timed(*, dry_run: bool) -> list[Step]:
    """A step of ZeRO-3 beside FSDP2's in one process, which fails where they do not train alike;
    and an op tuned, into a folder that is then deleted: the machine is left as it was.
    """
    step = ["bench", "step", "--world", "1", "--against", "fsdp2", "--launches", "1"]
    step += ["--device", "cpu", "--tiny", "--pairs", "3"] if dry_run else ["--device", "cuda"]
    # A kernel of that op compiles faster than a process that could do it starts.
    tune = ["autotune", "--op", "pack_", "--jobs", "1"]
    tune += ["--dry-run", "--arch", "sm_90"] if dry_run else ["--budget", "20", "--to", FOLDER]
    return [
        _command(STEP, step, STEP_LIMIT_S, _words("zero3  ")),
        _command(AUTOTUNE, tune, AUTOTUNE_LIMIT_S, _words("pack")),
    ]
