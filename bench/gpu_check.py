"""Owns `make gpu-check`: whether the kernels are right on a GPU, how fast, and if training runs.

    python3 bench/gpu_check.py            installs nothing; ends within 6 minutes
    python3 bench/gpu_check.py --dry-run  the whole script on a CPU, tiny: not a measurement

Writes gpu_check.json into $OUT (default bench/results) and prints one table. The tests and the
memory check come first: when they fail nothing is timed, and a kernel whose results are wrong has
no times either. Exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    runpy.run_path(str(ROOT / "tests" / "checkout.py"))["make_importable"]()

from sidestream.bench import (  # noqa: E402  (importable from here on)
    clocks,
    gpu_steps,
    kernel_table,
    machine,
    reports,
)
from sidestream.bench.kernel_cases.case import ALIGNMENT_NUMEL, Run  # noqa: E402
from sidestream.bench.kernel_cases.selection import Selection, select  # noqa: E402
from sidestream.kernels import pack_  # noqa: E402

BUDGET_S = 345.0
PACE = replace(kernel_table.GPU_PACE, compiled=False)
DRY_NUMEL = 64 * 1024
DRY_PACE = kernel_table.Pace(passes=1, min_rounds=1, max_rounds=1, seconds=0.0, sample_s=0.0)
DRY_LABEL = "dry run: not a measurement"


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 0 when everything that ran was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "gpu-check: expected a GPU that torch sees, got none; run it where there is one, or "
            "pass --dry-run (make gpu-check ARGS=--dry-run)"
        )
        return 1
    folder = Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    report = _check(dry_run=options.dry_run)
    file = folder / "gpu_check.json"
    file.write_text(json.dumps(report, indent=1, default=asdict) + "\n")
    _print(report)
    print(f"written to {file}")
    return 0 if report["ok"] else 1


def _check(*, dry_run: bool) -> dict[str, Any]:
    start = time.monotonic()
    budget = gpu_steps.Budget(BUDGET_S)
    device = torch.device("cpu" if dry_run else "cuda")
    steps = [gpu_steps.gpu_tests(budget, dry_run=dry_run), gpu_steps.memory_check(budget)]
    kernels, host_us = None, None
    if all(step.status != "failed" for step in steps):
        kernels = _kernels(device, dry_run=dry_run)
        calls = 200 if dry_run else 1000
        host_us = clocks.host_microseconds(_tiny_pack(device), clocks.clock_of(device), calls=calls)
        steps.append(_verdict(kernels))
    if not dry_run:
        torch.cuda.empty_cache()
    steps += gpu_steps.trainings(budget, dry_run=dry_run)
    return {
        "label": DRY_LABEL if dry_run else "measurement",
        "ok": all(step.status != "failed" for step in steps),
        "machine": machine.describe(device),
        "steps": [vars(step) for step in steps],
        "kernels": kernels,
        "pack_host_us": host_us,
        "seconds": time.monotonic() - start,
    }


def _kernels(device: torch.device, *, dry_run: bool) -> reports.Report:
    """The standard cases, without torch.compile, which would take minutes."""
    cases, pace = select(Selection()), DRY_PACE if dry_run else PACE
    numel = DRY_NUMEL if dry_run else kernel_table.default_numel(cases, device)
    measured = kernel_table.measure(cases, [numel], device, pace)
    return kernel_table.report_of(measured, device, pace, " ".join(sys.argv))


def _verdict(kernels: reports.Report) -> gpu_steps.StepResult:
    wrong = "; ".join(kernels.wrong)
    detail = f"wrong results: {wrong}" if wrong else "every result as defined"
    return gpu_steps.StepResult("kernel results", "failed" if wrong else "ok", 0.0, detail)


def _tiny_pack(device: torch.device) -> Run:
    """A call that is all host time."""
    tensors = [torch.ones(8, 8, device=device) for _ in range(9)]
    offsets = [ALIGNMENT_NUMEL * index for index in range(len(tensors))]
    flat = torch.empty(ALIGNMENT_NUMEL * len(tensors), device=device)
    return lambda: pack_(flat, tensors, offsets)


def _print(report: dict[str, Any]) -> None:
    found = report["machine"]
    print(f"\ngpu-check, {report['label']}: {found['device']}, torch {found['torch']}")
    print(f"\n{'step':<34} {'status':<8} {'s':>6}  detail")
    for step in report["steps"]:
        print(f"{step['name']:<34} {step['status']:<8} {step['seconds']:6.1f}  {step['detail']}")
    if report["kernels"] is not None:
        print(f"\n{report['label']}: {reports.format_table(report['kernels'])}")
    if report["pack_host_us"] is not None:
        print(f"\nhost time of pack_ for nine tiny tensors: {report['pack_host_us']:.1f} us a call")
    verdict = "all right" if report["ok"] else "FAILED"
    print(f"\n{verdict} in {report['seconds']:.0f} s ({report['label']})")


if __name__ == "__main__":
    sys.exit(main())
