"""What `make demo` runs: a run, the same run killed half-way, its resumption, and whether both end
in the same bits.

A  2 ranks, ZeRO-3, bf16 gradients on the wire                step 1 ......................... last
B  the same with checkpoints; every rank SIGKILLs itself      step 1 ...... saved ... killed
C  B resumed                                                               saved ............. last
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cli import main as sidestream

KILLED = 128 + 9
SAME_IN_BOTH = ("params_sha256", "loss_first", "loss_last", "loss_held_out")


@dataclass(frozen=True, slots=True)
class Story:
    """The steps of the demo: `saved_at` is the last checkpoint before every rank kills itself
    after `killed_at`.
    """

    steps: int
    every: int
    killed_at: int

    @property
    def saved_at(self) -> int:
        """Step of the checkpoint that the resumed run starts from."""
        return self.killed_at // self.every * self.every


def story_of(steps: int) -> Story:
    """Return the story of a run of this many steps: killed half-way, a little after a checkpoint.

    Raises:
        ValueError: too few steps to be killed between two checkpoints.
    """
    least = 8
    if steps < least:
        raise ValueError(f"expected at least {least} steps, got {steps}; pass a larger --steps")
    every = max(2, steps // 5)
    half_way = steps // 2
    return Story(steps, every, killed_at=half_way if half_way % every else half_way + 1)


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the figures, of those that must be equal bit for bit, in which two results differ."""
    return [name for name in SAME_IN_BOTH if first[name] != second[name]]


def run_demo(train_arguments: Sequence[str], steps: int) -> int:
    """Run the story and return 0 if the resumed run ends in the same bits as the uninterrupted
    one, else 1.
    """
    console = Console(highlight=False)
    story = story_of(steps)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sidestream-demo-") as folder:
        train = ["train", *train_arguments, "--steps", str(story.steps)]
        saving = [
            *train,
            "--checkpoint",
            f"{folder}/checkpoints",
            "--checkpoint-every",
            str(story.every),
        ]
        uninterrupted, resumed = f"{folder}/uninterrupted.json", f"{folder}/resumed.json"

        console.rule(f"1 of 3: {story.steps} steps, uninterrupted")
        code = sidestream([*train, "--json", uninterrupted])
        if code:
            return _stop(console, f"the uninterrupted run ended with code {code}")
        console.rule(
            f"2 of 3: the same, saved every {story.every} steps, killed after step "
            f"{story.killed_at}"
        )
        code = sidestream([*saving, "--kill-at-step", str(story.killed_at)])
        if code != KILLED:
            return _stop(console, f"expected the run to be killed (code {KILLED}), got code {code}")
        console.rule(f"3 of 3: resumed from step {story.saved_at}")
        code = sidestream([*saving, "--resume", "--json", resumed])
        if code:
            return _stop(console, f"the resumed run ended with code {code}")
        results = [json.loads(Path(path).read_text()) for path in (uninterrupted, resumed)]
    console.rule("outcome")
    console.print(_table(*results))
    different = differences(*results)
    took = f"({time.monotonic() - started:.0f} s in all)"
    if different:
        return _stop(
            console,
            f"killed and resumed is NOT bit-equal to uninterrupted: {', '.join(different)} {took}",
        )
    console.print(
        "[bold green]Killed and resumed is bit-equal to uninterrupted[/]: parameters and "
        f"losses. {took}"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Read the demo's few options and run it; what it does not know goes to `sidestream train`."""
    parser = argparse.ArgumentParser(
        prog="python -m sidestream.training.demo",
        description="Train, kill, resume, compare. Further options go to `sidestream train`.",
    )
    parser.add_argument("--steps", type=int, default=150)
    known, further = parser.parse_known_args(argv)
    defaults = [
        "--nproc", "2", "--device", "cpu", "--zero", "3", "--grad-wire", "bf16", "--model", "small",
        "--batch", "8", "--seq-len", "128",
    ]  # fmt: skip
    return run_demo([*defaults, *further], known.steps)


def _table(*results: Mapping[str, Any]) -> Table:
    table = Table("", "uninterrupted", "killed and resumed")
    rows: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "steps run": lambda result: f"{result['first_step']}-{result['steps']}",
        "loss, first and last step": lambda result: (
            f"{result['loss_first']:.6f} -> {result['loss_last']:.6f}"
        ),
        "held-out loss": lambda result: f"{result['loss_held_out']:.6f}",
        "tokens/s": lambda result: f"{result['tokens_per_s']:,.0f}",
        "step, median": lambda result: f"{result['step_ms_median']:.0f} ms",
        "peak memory of a rank": lambda result: f"{result['peak_mib']:.0f} MiB",
        "parameters, SHA-256": lambda result: result["params_sha256"][:20],
    }
    for name, show in rows.items():
        table.add_row(name, *(show(result) for result in results))
    return table


def _stop(console: Console, text: str) -> int:
    console.print(f"[bold red]demo failed[/]: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
