"""`sidestream autotune`: finds how kernels are best launched on this GPU, and writes a table of it.

    sidestream autotune                              all ops, into this user's folder
    sidestream autotune --op pack_,reduce_ --budget 60
    sidestream autotune --to package                 into kernels/tuned, to be committed
    sidestream autotune --dry-run --arch sm_90       the candidates, on any machine

Candidates that spill or leave a GPU too empty go at compile time, those with a wrong bit before
they are timed; the rest are timed in turn. Launches read the table from then on: docs/tuning.md.

Exit code 1 when a kernel's default gives a wrong result, 2 when what was asked for cannot be done,
which is told before anything is measured.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...training.errors import UsageError
from ...training.paths import require_writable_file
from .parsing import add_compiling_options, size

if TYPE_CHECKING:
    import torch

    from ...kernels import LaunchConfig
    from ..sweep import Sweep
    from ..tuning import Look, Task, Tunable

_BUDGET_S = 300.0
_ARCH = "sm_90"

Looks = dict["LaunchConfig", "Look"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `autotune` and its options."""
    parser = subparsers.add_parser(
        "autotune",
        help="find how kernels are best launched on this GPU, and write a table of it",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_compiling_options(parser, written="what was found")
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=_BUDGET_S,
        metavar="SECONDS",
        help=f"for all of it together (default: {_BUDGET_S:.0f}); what it does not reach keeps "
        "its default",
    )
    parser.add_argument(
        "--numel",
        type=size,
        default="64M",
        metavar="N",
        help="about how many elements a call reads, 1M being 2^20 (default: 64M)",
    )
    parser.add_argument(
        "--to",
        default="user",
        metavar="WHERE",
        help="user: this user's folder (default); package: kernels/tuned; or a folder",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list candidates and what the compiler makes of them; no GPU, no times, no table",
    )
    parser.add_argument(
        "--arch", help=f"what --dry-run compiles for (default: this GPU, or {_ARCH})"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tune, print and write; or list candidates.

    Raises:
        UsageError: an op that is not known, no GPU, or no place to write to; nothing was done.
    """
    from .. import tuning

    chosen = tuning.select(options.op)
    if options.json is not None:
        require_writable_file(str(options.json), "--json")
    if options.dry_run:
        return _list(chosen, options)
    return _tune(chosen, options)


def _list(chosen: Sequence[Tunable], options: argparse.Namespace) -> int:
    from ..reports import write_json
    from ..tuned_files import as_listing
    from ..tuning import reason

    target = _target(options.arch)
    looks = _looks(chosen, target, options.jobs, lambda: False)
    print(f"candidates on {target}; B: bytes of a block, W: warps; the first one is the default")
    for tunable in chosen:
        own = looks[tunable.op, tunable.key]
        kept = [reason(look) for look in own.values()].count(None)
        print(f"{tunable.name}: {kept} of {len(own)} to be timed")
        for config, look in own.items():
            print(f"  {_config_text(config):<14} {_look_text(look)}")
    if options.json is not None:
        write_json(options.json, as_listing(chosen, looks, target))
    return 0


def _tune(chosen: Sequence[Tunable], options: argparse.Namespace) -> int:
    from ...kernels import tuned
    from .. import tuned_files
    from ..kernel_table import require_memory
    from ..reports import write_json
    from ..tuning import target_of

    if options.arch is not None:
        raise UsageError(f"expected --arch with --dry-run alone, got {options.arch}; leave it out")
    device = _gpu()
    require_memory([tunable.case for tunable in chosen], [options.numel], device)
    name = tuned.device_name(device)
    assert name is not None
    path = tuned_files.destination(options.to, name)
    head = tuned_files.head(device, options.arguments)
    kept, note = tuned_files.kept_entries(path, name, str(head["triton"]))
    if note:
        print(f"note: {note}")
    end = time.monotonic() + options.budget
    compiled_by = time.monotonic() + options.budget / 3
    looks = _looks(chosen, target_of(device), options.jobs, lambda: time.monotonic() >= compiled_by)
    entries: list[dict[str, Any]] = []
    wrong = 0
    for index, tunable in enumerate(chosen):
        own = looks[tunable.op, tunable.key]
        budget = (end - time.monotonic()) / (len(chosen) - index)
        found = _sweep(tunable, own, options.numel, device, max(budget, 0.0))
        print(_result_text(tunable, found), flush=True)
        if found.chosen is None:
            wrong += 1
            continue
        entries.append(tuned_files.entry_of(tunable, found, own, numel=options.numel))
        # After each, so that who stops it keeps what there is.
        write_json(path, tuned_files.document(kept, entries, head))
    if entries:
        print(f"written to {path}")
        for text in tuned_files.overruling(path, name):
            print(f"note: {text}")
    if options.json is not None:
        write_json(options.json, tuned_files.document((), entries, head))
    return 1 if wrong else 0


def _sweep(
    tunable: Tunable, looks: Looks, numel: int, device: torch.device, budget_s: float
) -> Sweep:
    from ..clocks import clock_of
    from ..progress import line
    from ..sweep import sweep
    from ..tuning import Workbench, reason

    bench = Workbench(tunable, numel, device, clock_of(device))
    with line() as tell:

        def sample(config: LaunchConfig) -> float:
            tell(f"{tunable.name}: timing {_config_text(config)}")
            return bench.sample(config)

        def gate(config: LaunchConfig) -> str | None:
            tell(f"{tunable.name}: checking {_config_text(config)}")
            return bench.fault(config)

        return sweep(
            tunable.candidates(),
            prune=lambda config: reason(looks.get(config)),
            gate=gate,
            sample=sample,
            budget_s=budget_s,
            now=time.monotonic,
        )


def _looks(
    chosen: Sequence[Tunable], target: str, jobs: int, is_over: Callable[[], bool]
) -> dict[tuple[str, str], Looks]:
    """What the compiler made of every candidate, by tunable."""
    from ..progress import shown
    from ..tuning import look_at_all

    keys: dict[Task, tuple[str, str]] = {
        (tunable.op, tunable.case.name, config, target): (tunable.op, tunable.key)
        for tunable in chosen
        for config in tunable.candidates()
    }

    def told(task: Task) -> None:
        step(f"{' '.join(keys[task])} {_config_text(task[2])}")

    looks: dict[tuple[str, str], Looks] = {(one.op, one.key): {} for one in chosen}
    with shown(len(keys), "compiled") as step:
        found = look_at_all(list(keys), jobs, told, is_over)
    for task, look in found.items():
        looks[keys[task]][task[2]] = look
    return looks


def _target(arch: str | None) -> str:
    import torch

    from ..ahead.selection import only_target, targets_of
    from ..tuning import target_of

    if arch is not None:
        return only_target(targets_of(arch), "--dry-run")
    return target_of(torch.device("cuda")) if torch.cuda.is_available() else _ARCH


def _gpu() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "autotune: expected a GPU that torch sees, got none; add --dry-run to list the "
            "candidates. Without a GPU these work too: inspect, bench kernels, bench host, "
            "bench step, bench overlap, train, doctor"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _config_text(config: LaunchConfig) -> str:
    return f"{config.block_bytes} B {config.num_warps} W"


def _look_text(look: Look) -> str:
    from ..tuning import Resources

    if not isinstance(look, Resources):
        return look
    share = "-" if look.occupancy is None else f"{look.occupancy:.0%}"
    text = f"{look.registers:4} registers {look.shared_bytes:6} shared bytes {share:>4} occupancy"
    return text if look.reason is None else f"{text}  pruned: {look.reason}"


def _result_text(tunable: Tunable, found: Sweep) -> str:
    """One line: what was chosen, its time, and what it saves; or what is wrong."""
    default = found.trials[0]
    if found.chosen is None:
        return f"{tunable.name:<32} WRONG, so not tuned: {default.fate}"
    timed = sum(bool(one.samples) for one in found.trials)
    if found.gain is None:
        return f"{tunable.name:<32} {_config_text(found.chosen):<14} the default, untimed"
    median_us = 1e6 * found.median_of(found.chosen)
    what = "the default" if found.chosen == default.config else f"{found.gain:.1%} faster"
    return (
        f"{tunable.name:<32} {_config_text(found.chosen):<14} {median_us:9.1f} us  {what}, "
        f"of {timed} timed"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}; pass such as 60")
    return seconds
