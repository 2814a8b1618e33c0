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

from .gpu_steps import FAILED, FILE, FOLDER, NOT_RUN, OK, Outcome, Result, Step, unfinished

AGREE = "ZeRO-0 and ZeRO-3 agree"
STEP, AUTOTUNE = "step time against FSDP2", "autotune of pack_"
TRAINING_LIMIT_S, STEP_LIMIT_S, AUTOTUNE_LIMIT_S = 75.0, 75.0, 60.0
# Losses of two runs that differ only in the order of some sums may differ by this much.
LOSS_TOLERANCE = 0.02


def _command(
    name: str,
    arguments: Sequence[str],
    limit_s: float,
    tell: Callable[[str, Mapping[str, Any]], Result],
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
    return Step(name, [[sys.executable, "-m", package, *arguments, "--json", FILE]], judge, limit_s)


def _words(beginning: str) -> Callable[[str, Mapping[str, Any]], Result]:
    """Tells the lines that begin so."""

    def tell(output: str, found: Mapping[str, Any]) -> Result:
        lines = [line for line in output.splitlines() if line.startswith(beginning)]
        return Result(OK, "; ".join(" ".join(line.split()) for line in lines), found)

    return tell


def trainings(*, dry_run: bool) -> list[Step]:
    """Of one rank, at two levels and in bf16; the first two are to agree."""
    device = "cpu" if dry_run else "cuda"
    common = ["train", "--steps", "20", "--nproc", "1", "--device", device]
    common += ["--model", "tiny", "--seq-len", "64"] if dry_run else []
    options = {"ZeRO-0": ["--zero", "0"], "ZeRO-3": ["--zero", "3"]}
    options["ZeRO-3 bf16"] = [*options["ZeRO-3"], "--compute", "bf16", "--grad-wire", "bf16"]
    return [
        _command(f"train 1 rank {device} {name}", [*common, *given], TRAINING_LIMIT_S, _trained)
        for name, given in options.items()
    ]


def _trained(_: str, found: Mapping[str, Any]) -> Result:
    first, last = found["loss_first"], found["loss_last"]
    learnt = math.isfinite(last) and last < first
    detail = f"loss {first:.3f} -> {last:.3f}; peak {found['peak_mib']:.0f} MiB"
    if found["reserved_mib"] is not None:
        detail += f", {found['reserved_mib']:.0f} reserved"
    return Result(OK if learnt else FAILED, detail, found)


def same_training(first: Result, second: Result) -> Result:
    """Same data, seed and rank count at two ZeRO levels: same losses, and at best the same bits.

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
