"""`make gpu-check`: whether the kernels are right on a GPU, how fast, and if training runs there.

    python3 bench/gpu_check.py            installs nothing; ends within 6 minutes
    python3 bench/gpu_check.py --dry-run  the whole script on a CPU, tiny: not a measurement

    gpu tests, memcheck, racecheck      side by side, as the trainings are
    gpu tests that take times           alone, as all below but the trainings
    kernels                             beside their rivals; what is wrong has no times
    trainings                           1 rank, alone and over NCCL; 2 and 4 that share the GPU
    symmetric memory                    1 rank, whose sums read its own; 2 where there are 2 GPUs
    step time, autotune                 of one rank against FSDP2; of one op

Prints each result as it comes, and writes <gpu>/<date>.json and <gpu>/<date>-kernels.json into $OUT
(default bench/results); the second is what `sidestream bench kernels --json` writes too, for
`sidestream bench report` and `--baseline`. What passes its own gate is timed whatever else failed;
the report of the kernels then notes what did. Exit code 1 when anything failed, 2 when the check
cannot be done here. A step that is not run, for lack of time or of what it needs, fails nothing:
the verdict names it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    runpy.run_path(str(ROOT / "tests" / "checkout.py"))["make_importable"]()

from sidestream.bench import (  # noqa: E402  (importable from here on)
    gpu_commands,
    gpu_kernels,
    gpu_tests,
    reports,
)
from sidestream.bench.gpu_steps import (  # noqa: E402
    FAILED,
    NOT_RUN,
    Budget,
    Result,
    Step,
    attempt,
    side_by_side,
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
# Each training compiles, or is several ranks.
_CORES_A_TRAINING = 4


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
    for step in report["steps"]:
        if step["status"] == FAILED:
            print(f"\nFAILED, {step['name']}: {step['detail']}")
    print(f"\n{report['verdict']}, in {report['seconds']:.0f} s ({report['label']})")
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
    report = {
        **reports.document(KIND, (), device, schema_version=SCHEMA_VERSION),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "label": DRY_LABEL if dry_run else "measurement",
    }
    _say(f"gpu-check, {report['label']}: {report['machine']['device']}, torch {torch.__version__}")
    _say(f"\n{'step':<34} {'status':<8} {'s':>6}  detail")
    check = _Check(budget, device, dry_run, report["label"])
    check.run()
    report |= {
        "ok": not _failed(check.results),
        "verdict": verdict(check.results),
        "seconds": time.monotonic() - start,
        "steps": [vars(result) for result in check.results],
    }
    return report, check.kernels


@dataclass
class _Check:
    """The steps in the order of need, and what came of them."""

    budget: Budget
    device: torch.device
    dry_run: bool
    label: str
    results: list[Result] = field(default_factory=list)
    kernels: reports.Report | None = None

    def run(self) -> None:
        """All of them."""
        dry_run = self.dry_run
        self._side_by_side(gpu_tests.beside(dry_run=dry_run))
        self._side_by_side([gpu_tests.timed()])
        self._tell(attempt(gpu_kernels.KERNELS, self._kernels))
        self._trainings()
        for step in gpu_commands.timed(dry_run=dry_run):
            self._side_by_side([step])

    def _side_by_side(self, steps: Sequence[Step], *, cores_each: int = 1) -> list[Result]:
        return side_by_side(self.budget, steps, self._tell, cores_each=cores_each)

    def _trainings(self) -> None:
        trainings = gpu_commands.trainings(dry_run=self.dry_run)
        tests = [make(dry_run=self.dry_run) for make in (gpu_tests.shared, gpu_tests.symmetric)]
        steps = [*trainings, *tests]
        zero0, zero3, group, *_ = self._side_by_side(steps, cores_each=_CORES_A_TRAINING)
        same = gpu_commands.same_training
        self._tell(attempt(gpu_commands.AGREE, lambda: same(zero0, zero3)))
        self._tell(attempt(gpu_commands.GROUP_AGREES, lambda: same(zero3, group)))

    def _kernels(self) -> Result:
        seconds = min(self.budget.limit(gpu_kernels.LIMIT_S), self.budget.left_s)
        finding, report = gpu_kernels.kernels(self.device, seconds, _say, dry_run=self.dry_run)
        if report is not None and (failed := _failed(self.results)):
            note = f"measured by a check in which this failed: {', '.join(failed)}"
            report = replace(report, notes=(*report.notes, note))
        self.kernels = report
        if report is not None:
            _say(f"\n{self.label}: {reports.format_table(report)}\n")
        return finding

    def _tell(self, result: Result) -> None:
        self.results.append(result)
        detail = result.detail.partition("\n")[0]
        if result.status == FAILED:  # told in full at the end
            detail = detail[:_DETAIL_CHARACTERS]
        _say(f"{result.name:<34} {result.status:<8} {result.seconds:6.1f}  {detail}")
        if "pack_host_us" in result.values:
            host = f"pack_ of nine tiny tensors: {result.values['pack_host_us']:.1f} us a call"
            _say(f"{'':<51}host time of {host}")


def _say(text: str) -> None:
    print(text, flush=True)


def _failed(results: Sequence[Result]) -> list[str]:
    return [result.name for result in results if result.status == FAILED]


def verdict(results: Sequence[Result]) -> str:
    """In words; what is not run fails nothing, whatever the cause, and is named."""
    failed = _failed(results)
    text = f"FAILED: {', '.join(failed)}" if failed else "all right"
    if left_out := [result.name for result in results if result.status == NOT_RUN]:
        count = "1 step" if len(left_out) == 1 else f"{len(left_out)} steps"
        text += f"{'; ' if failed else ', but '}{count} not run: {', '.join(left_out)}"
    return text


def _write(folder: Path, report: dict[str, Any], kernels: reports.Report | None) -> list[Path]:
    """Beside what stands there of the same day."""
    day = datetime.now(UTC).date().isoformat()
    name, number = day, 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{day}-{number}"
    documents = {folder / f"{name}.json": report}
    if kernels is not None:
        documents[folder / f"{name}-kernels.json"] = kernels.content()
    for path, content in documents.items():
        reports.write_json(path, content)
    return list(documents)


if __name__ == "__main__":
    # Programs are in groups of their own: whoever ends the check must end them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
