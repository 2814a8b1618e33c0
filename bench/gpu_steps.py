"""Owns the parts of `make gpu-check` that are other programs: tests, sanitizer, training."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GPU_MARKER = "mark.gpu"
SANITIZER = "compute-sanitizer"
SANITIZER_FOLDERS = ("/usr/local/cuda/bin",)
SANITIZER_FAULT = 9
# Losses of two runs that differ only in the order of some sums may differ by this much.
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True)
class StepResult:
    """One step: `status` is "ok", "failed", or "not run" where the machine lacks what it needs."""

    name: str
    status: str
    seconds: float
    detail: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How one subprocess ended; `code` is None when it ran out of time."""

    code: int | None
    output: str
    seconds: float


class Budget:
    """The time that is left to the whole check."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def run(
        self, command: Sequence[str], *, limit_s: float, variables: Mapping[str, str] | None = None
    ) -> Outcome:
        """Run `command` in the checkout, for at most `limit_s` and what is left of the budget."""
        start = time.monotonic()
        limit = max(1.0, min(limit_s, self._end - start))
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **(variables or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout or b""
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            return Outcome(None, f"{text}\nout of time after {limit:.0f} s", limit)
        return Outcome(done.returncode, done.stdout, time.monotonic() - start)


def gpu_tests(budget: Budget, *, dry_run: bool) -> StepResult:
    """The tests marked `gpu`, with pytest alone: its plugins, and our settings for them, are absent
    on a bare machine. Compiling takes most of the time, so files run side by side."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if GPU_MARKER in path.read_text()
    )
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="]
    groups = [files] if dry_run else [[file] for file in files]
    start = time.monotonic()
    with ThreadPoolExecutor(max_workers=min(len(groups), os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(lambda group: budget.run([*command, *group], limit_s=180), groups))
    seconds = time.monotonic() - start
    summaries = [outcome.output.strip().rpartition("\n")[2] for outcome in outcomes]
    for outcome, summary in zip(outcomes, summaries, strict=True):
        if outcome.code != 0 or not (dry_run or " passed" in summary):
            detail = _tail(outcome)
            return StepResult("gpu tests", "failed", seconds, detail, {"files": files})
    counts = {word: _count(summaries, word) for word in ("passed", "skipped")}
    detail = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return StepResult("gpu tests", "ok", seconds, detail, {"files": files})


def _count(summaries: Sequence[str], word: str) -> int:
    """The sum of the numbers before `word` in pytest's last lines."""
    found = [re.search(rf"(\d+) {word}", summary) for summary in summaries]
    return sum(int(match[1]) for match in found if match)


def memory_check(budget: Budget) -> StepResult:
    """compute-sanitizer over every kernel, where it is installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *SANITIZER_FOLDERS])
    tool = shutil.which(SANITIZER, path=path)
    if tool is None:
        where = f"no {SANITIZER} in PATH or {', '.join(SANITIZER_FOLDERS)}"
        return StepResult("memory check", "not run", 0.0, where)
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(SANITIZER_FAULT)]
    command += [sys.executable, "-m", f"{_package()}.gpu_memcheck"]
    # Each tensor in an allocation of its own: what is out of bounds then belongs to nobody.
    outcome = budget.run(command, limit_s=90, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    clean = outcome.code == 0
    return StepResult(
        name="memory check",
        status="ok" if clean else "failed",
        seconds=outcome.seconds,
        detail=f"{SANITIZER} memcheck: no fault" if clean else _tail(outcome),
    )


def trainings(budget: Budget, *, dry_run: bool) -> list[StepResult]:
    """Short trainings by the command line: one rank on the device, and two ranks over gloo.

    Two ranks cannot share a GPU (`sidestream train` refuses more ranks than GPUs, as NCCL would),
    so the gloo ranks compute on the CPU of this machine.
    """
    device = "cpu" if dry_run else "cuda"
    one = ["--nproc", "1", "--device", device]
    bf16 = ["--compute", "bf16", "--grad-wire", "bf16"]
    runs = {
        f"train 1 rank {device} ZeRO-0": [*one, "--zero", "0"],
        f"train 1 rank {device} ZeRO-3": [*one, "--zero", "3"],
        f"train 1 rank {device} ZeRO-3 bf16": [*one, "--zero", "3", *bf16],
        "train 2 ranks gloo cpu ZeRO-3": ["--nproc", "2", "--device", "cpu", "--zero", "3"],
    }
    size = ["--model", "tiny", "--seq-len", "64"] if dry_run else []
    results = [_training(budget, name, [*arguments, *size]) for name, arguments in runs.items()]
    return [*results, _same_training(results[0], results[1])]


def _training(budget: Budget, name: str, arguments: Sequence[str]) -> StepResult:
    package = _package().rpartition(".")[0]
    command = [sys.executable, "-m", package, "train", "--steps", "20", *arguments]
    outcome = budget.run(command, limit_s=75)
    found = _result_line(outcome.output)
    if outcome.code != 0 or found is None:
        return StepResult(name, "failed", outcome.seconds, _tail(outcome))
    first, last = found["loss_first"], found["loss_last"]
    learnt = math.isfinite(last) and last < first
    return StepResult(
        name=name,
        status="ok" if learnt else "failed",
        seconds=outcome.seconds,
        detail=f"loss {first:.3f} -> {last:.3f}, {found['step_ms_median']:.1f} ms a step",
        values=found,
    )


def _same_training(first: StepResult, second: StepResult) -> StepResult:
    """Same data, seed and rank count at two ZeRO levels: same losses, and at best the same bits.

    The bits are reported and not demanded: attention's backward on a GPU may add in any order.
    """
    name = "ZeRO-0 and ZeRO-3 agree"
    if not (first.values and second.values):
        return StepResult(name, "failed", 0.0, "one of the two runs gave no result")
    losses = first.values["loss_last"], second.values["loss_last"]
    same_bits = first.values["params_sha256"] == second.values["params_sha256"]
    agree = abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * abs(losses[0])
    detail = f"losses {losses[0]:.4f}, {losses[1]:.4f}; same bits: {'yes' if same_bits else 'no'}"
    return StepResult(
        name, "ok" if agree else "failed", 0.0, detail, values={"same_bits": same_bits}
    )


def _result_line(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return None


def _tail(outcome: Outcome) -> str:
    return f"exit {outcome.code}: ...{outcome.output.strip()[-2000:]}"


def _package() -> str:
    assert __package__
    return __package__
