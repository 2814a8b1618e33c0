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
import platform
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    runpy.run_path(str(ROOT / "tests" / "checkout.py"))["make_importable"]()

from sidestream.bench import gpu_kernels, gpu_steps  # noqa: E402  (importable from here on)

BUDGET_S = 345.0
ROUNDS = 25
DRY_ROUNDS = 3
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
    file.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    print(f"written to {file}")
    return 0 if report["ok"] else 1


def _check(*, dry_run: bool) -> dict[str, Any]:
    start = time.monotonic()
    budget = gpu_steps.Budget(BUDGET_S)
    device = torch.device("cpu" if dry_run else "cuda")
    steps = [gpu_steps.gpu_tests(budget, dry_run=dry_run), gpu_steps.memory_check(budget)]
    timings: list[gpu_kernels.Timing] = []
    host_us = None
    if all(step.status != "failed" for step in steps):
        timings, wrong = gpu_kernels.measure_all(
            device, rounds=DRY_ROUNDS if dry_run else ROUNDS, tiny=dry_run
        )
        host_us = gpu_kernels.host_microseconds(device, calls=200 if dry_run else 1000)
        detail = f"wrong results: {', '.join(wrong)}" if wrong else "every result as defined"
        steps.append(
            gpu_steps.StepResult("kernel results", "failed" if wrong else "ok", 0.0, detail)
        )
    if not dry_run:
        torch.cuda.empty_cache()
    steps += gpu_steps.trainings(budget, dry_run=dry_run)
    return {
        "label": DRY_LABEL if dry_run else "measurement",
        "ok": all(step.status != "failed" for step in steps),
        "machine": _machine(device),
        "steps": [vars(step) for step in steps],
        "kernels": gpu_kernels.as_rows(timings),
        "pack_host_us": host_us,
        "seconds": time.monotonic() - start,
    }


def _machine(device: torch.device) -> dict[str, Any]:
    import triton

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": platform.processor() or platform.machine(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "command": " ".join(sys.argv),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        query = ("nvidia-smi", "--query-gpu=driver_version,clocks.max.mem", "--format=csv,noheader")
        found["driver, memory clock"] = _output(*query)
    return found


def _percent(row: dict[str, Any]) -> str:
    target = row["target_percent"]
    return "" if target is None else f"{target:.0f}"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _print(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(f"\ngpu-check, {report['label']}: {machine['device']}, torch {machine['torch']}")
    print(f"\n{'step':<34} {'status':<8} {'s':>6}  detail")
    for step in report["steps"]:
        print(f"{step['name']:<34} {step['status']:<8} {step['seconds']:6.1f}  {step['detail']}")
    if report["kernels"]:
        print(
            f"\n{'case':<34} {'candidate':<16} {'ms':>8} {'95 % interval':>19} "
            f"{'GB/s':>8} {'% copy':>7} {'target':>7}   {report['label']}"
        )
    for row in report["kernels"]:
        interval = f"[{row['low_ms']:.3f}, {row['high_ms']:.3f}]"
        print(
            f"{row['case']:<34} {row['candidate']:<16} {row['median_ms']:8.3f} {interval:>19} "
            f"{row['gb_per_s']:8.1f} {row['percent_of_copy']:7.1f} {_percent(row):>7}"
        )
    if report["pack_host_us"] is not None:
        print(f"\nhost time of pack_ for nine tiny tensors: {report['pack_host_us']:.1f} us a call")
    verdict = "all right" if report["ok"] else "FAILED"
    print(f"\n{verdict} in {report['seconds']:.0f} s ({report['label']})")


if __name__ == "__main__":
    sys.exit(main())
