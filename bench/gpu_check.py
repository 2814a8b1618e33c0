"""Owns `make gpu-check`: whether the kernels are right on a GPU, how fast, and if training runs.

    python3 bench/gpu_check.py            installs nothing; ends within 6 minutes
    python3 bench/gpu_check.py --dry-run  the whole script on a CPU, tiny: not a measurement

    tests, memcheck, racecheck    side by side; when one fails nothing is timed
    tests that take times         alone, as all below but the trainings
    kernels                       beside their rivals; what is wrong has no times
    trainings                     1 rank; 2 and 4 ranks that share the GPU: side by side
    step time, autotune           of one rank against FSDP2; of one op

Prints one table, and writes <gpu>/<date>.json and <gpu>/<date>-kernels.json into $OUT (default
bench/results); the second is what `sidestream bench kernels --json` writes too, for
`sidestream bench report` and `--baseline`. Exit code 1 when anything failed, 2 when the check
cannot be done here. A step that is not run, for lack of time or of what it needs, fails nothing:
the verdict names it.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    runpy.run_path(str(ROOT / "tests" / "checkout.py"))["make_importable"]()

from sidestream.bench import (  # noqa: E402  (importable from here on)
    gpu_gates,
    gpu_speed,
    gpu_training,
    reports,
)
from sidestream.bench.gpu_steps import (  # noqa: E402
    FAILED,
    NOT_RUN,
    Budget,
    StepResult,
    attempt,
    together,
)
from sidestream.kernels import tuned  # noqa: E402
from sidestream.training.errors import UsageError  # noqa: E402
from sidestream.training.paths import require_writable_folder  # noqa: E402

BUDGET_S = 345.0
KIND, SCHEMA_VERSION = "gpu_check", 1
DRY_LABEL = "dry run: not a measurement"
DRY_FOLDER = "cpu_dry_run"
# Limits are for a machine with a GPU, which has cores for a few programs at a time.
DRY_PATIENCE = 4.0
EXIT_USAGE = 2
_DETAIL_CHARACTERS = 150


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 0 when everything that ran was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args(arguments)
    try:
        device = _device(dry_run=options.dry_run)
        folder = results_folder(device)
        require_writable_folder(str(folder), "OUT")
    except UsageError as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    report, kernels = _check(device, dry_run=options.dry_run)
    files = _write(folder, report, kernels)
    _print(report, kernels)
    print(f"written to {' and '.join(map(str, files))}")
    return 0 if report["ok"] else 1


def _device(*, dry_run: bool) -> torch.device:
    if dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "expected a GPU that torch sees, got none; run it where there is one, or pass "
            "--dry-run (make gpu-check ARGS=--dry-run)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def results_folder(device: torch.device) -> Path:
    """Where results of `device` go: named as its tuned table is."""
    name = tuned.device_name(device)
    folder = DRY_FOLDER if name is None else Path(tuned.file_name(name)).stem
    return Path(os.environ.get("OUT") or ROOT / "bench" / "results", folder)


def _check(device: torch.device, *, dry_run: bool) -> tuple[dict[str, Any], reports.Report | None]:
    start = time.monotonic()
    budget = Budget(BUDGET_S, patience=DRY_PATIENCE if dry_run else 1.0)
    head = reports.document(KIND, (), device, schema_version=SCHEMA_VERSION)
    steps, kernels = _steps(budget, device, dry_run=dry_run)
    report = {
        **head,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "label": DRY_LABEL if dry_run else "measurement",
        "ok": _all_right(steps),
        "verdict": verdict(steps),
        "seconds": time.monotonic() - start,
        "steps": [vars(step) for step in steps],
    }
    return report, kernels


def _steps(
    budget: Budget, device: torch.device, *, dry_run: bool
) -> tuple[list[StepResult], reports.Report | None]:
    gates = {gpu_gates.TESTS: partial(gpu_gates.gpu_tests, budget, dry_run=dry_run)}
    for tool in gpu_gates.TOOLS:
        gates[tool] = partial(gpu_gates.sanitizer, budget, tool, dry_run=dry_run)
    steps = together(budget, gates)
    kernels, closed = None, []
    if _all_right(steps):
        last_gate = partial(gpu_gates.timed_tests, budget, dry_run=dry_run)
        steps.append(attempt(gpu_gates.TIMED, last_gate))
    else:
        closed.append(gpu_gates.TIMED)
    if is_open := _all_right(steps):
        measured, kernels = _kernels(budget, device, dry_run=dry_run)
        steps.append(measured)
    steps += gpu_training.trainings(budget, dry_run=dry_run)
    timed = {gpu_speed.STEP: gpu_speed.step_time, gpu_speed.AUTOTUNE: gpu_speed.autotune}
    if is_open:
        for name, step in timed.items():
            steps.append(attempt(name, partial(step, budget, dry_run=dry_run)))
    else:
        closed += [gpu_speed.KERNELS, *timed]
    why = "the tests or a sanitizer failed, so nothing is timed"
    steps += [StepResult(name, NOT_RUN, 0.0, why) for name in closed]
    return steps, kernels


def _all_right(steps: Sequence[StepResult]) -> bool:
    return all(step.status != FAILED for step in steps)


def verdict(steps: Sequence[StepResult]) -> str:
    """In words; what is not run fails nothing, whatever the cause, and is named."""
    named = {
        status: [step.name for step in steps if step.status == status]
        for status in (FAILED, NOT_RUN)
    }
    text = f"FAILED: {', '.join(named[FAILED])}" if named[FAILED] else "all right"
    if left_out := named[NOT_RUN]:
        link = "; " if named[FAILED] else ", but "
        count = "1 step" if len(left_out) == 1 else f"{len(left_out)} steps"
        text += f"{link}{count} not run: {', '.join(left_out)}"
    return text


def _kernels(
    budget: Budget, device: torch.device, *, dry_run: bool
) -> tuple[StepResult, reports.Report | None]:
    report = None

    def step() -> StepResult:
        nonlocal report
        result, report = gpu_speed.kernels(budget, device, dry_run=dry_run)
        return result

    return attempt(gpu_speed.KERNELS, step), report


def _write(folder: Path, report: dict[str, Any], kernels: reports.Report | None) -> list[Path]:
    """Beside what stands there of the same day."""
    day = datetime.now(UTC).date().isoformat()
    name, number = day, 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{day}-{number}"
    texts = {f"{name}.json": json.dumps(report, indent=1) + "\n"}
    if kernels is not None:
        texts[f"{name}-kernels.json"] = kernels.as_json()
    for file, text in texts.items():
        reports.write_text(folder / file, text)
    return [folder / file for file in texts]


def _print(report: dict[str, Any], kernels: reports.Report | None) -> None:
    found = report["machine"]
    if kernels is not None:
        print(f"\n{report['label']}: {reports.format_table(kernels)}")
    print(f"\ngpu-check, {report['label']}: {found['device']}, torch {found['torch']}")
    print(f"\n{'step':<34} {'status':<8} {'s':>6}  detail")
    for step in report["steps"]:
        detail = step["detail"].partition("\n")[0]
        if step["status"] == FAILED:  # told in full below
            detail = detail[:_DETAIL_CHARACTERS]
        print(f"{step['name']:<34} {step['status']:<8} {step['seconds']:6.1f}  {detail}")
        if "pack_host_us" in step["values"]:
            host = f"pack_ of nine tiny tensors: {step['values']['pack_host_us']:.1f} us a call"
            print(f"{'':<51}host time of {host}")
    for step in report["steps"]:
        if step["status"] == FAILED:
            print(f"\nFAILED, {step['name']}: {step['detail']}")
    print(f"\n{report['verdict']}, in {report['seconds']:.0f} s ({report['label']})")


if __name__ == "__main__":
    # Programs are in groups of their own: whoever ends the check must end them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
