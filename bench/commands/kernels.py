"""`sidestream bench kernels`: times kernels that are right, beside rivals and a copy.

    sidestream bench kernels                                    all standard cases, on a GPU if any
    sidestream bench kernels --op pack_,reduce_ --numel 1M,16M --json now.json
    sidestream bench kernels --format mxfp8 --baseline then.json
    sidestream bench kernels --html now.html                    a page to look at

Exit code 1 when a result is wrong, a kernel slower than in the baseline, or none could be compared
with it; 2 when what was asked for cannot be done, which is told before anything is measured.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ...training.errors import UsageError
from ...training.paths import require_writable_file
from .parsing import DEVICES, counts, names, sizes

if TYPE_CHECKING:
    import torch

    from ..reports import Report


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `kernels` with its options."""
    parser = subparsers.add_parser(
        "kernels",
        help="time kernels beside their rivals and a copy of as many bytes",
        description="Time kernels beside their rivals and a copy of as many bytes. A kernel whose "
        "result is wrong has no times. Options that take several values take them with commas.",
    )
    parser.add_argument("--op", type=names, help="ops of docs/kernels.md: pack_,quantize_mx")
    parser.add_argument(
        "--format",
        type=names,
        help="formats that are read or written: bf16,e4m3,mxfp8",
    )
    parser.add_argument(
        "--dtype", type=names, help="of what is converted from or to, and of gradients: bf16,fp32"
    )
    parser.add_argument("--world", type=counts, help="only sums over so many ranks: 2,8")
    parser.add_argument(
        "--numel",
        type=sizes,
        help="about how many elements are read, 1M being 2^20 "
        "(default 1M, on a GPU 208M, which is a Llama 3 8B block)",
    )
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile of plain PyTorch competes (default: on a GPU; a CPU needs a C++ "
        "compiler and some seconds a case)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--csv", metavar="FILE", help="write the rows")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write one page of curves, roofline and rivals; needs sidestream[report]",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="print ratios to an earlier --json of this machine, and fail where a kernel is "
        "slower by more than 15 %%, not counting what the machine does to a copy as well",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 0 when everything is right and nothing slower."""
    from .. import baseline, kernel_table
    from ..kernel_cases.selection import Selection, select
    from ..machine import describe
    from ..progress import line
    from ..report.build import write_page
    from ..report.roofline import gpu_of
    from ..reports import format_table

    device = device_named(options.device)
    cases = select(
        Selection(
            ops=options.op,
            formats=options.format,
            dtypes=options.dtype,
            worlds=options.world,
        )
    )
    numels = options.numel or (kernel_table.default_numel(cases, device),)
    _require_files(options)
    earlier = None
    if options.baseline is not None:
        earlier = baseline.read_baseline(Path(options.baseline), describe(device))
        asked = [(case.full_name, case.numel(numel)) for case in cases for numel in numels]
        baseline.require_comparable(asked, earlier, options.baseline)
    kernel_table.require_memory(cases, numels, device)
    pace = kernel_table.pace_of(device, compiled=options.compile)
    with line() as tell:
        measured = kernel_table.measure(cases, numels, device, pace, tell)
    command = shlex.join(["sidestream", *options.arguments])
    report = kernel_table.report_of(measured, device, pace, command)
    gpu = gpu_of(str(report.machine["device"]))
    print(format_table(report, None if gpu is None else gpu.memory_gb_s))
    _write(options, report)
    if earlier is not None:
        print(baseline.format_comparison(report.rows, earlier))
    if options.html is not None:
        write_page(report, Path(options.html))
    passes = earlier is None or baseline.passes(report.rows, earlier.rows)
    return 0 if passes and not report.wrong else 1


def _require_files(options: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written, or of which one would replace another."""
    from ..report.build import require_page

    options_by_file: dict[Path, str] = {}
    for option in ("--json", "--csv", "--html"):
        path = getattr(options, option.lstrip("-"))
        if path is None:
            continue
        if option == "--html":
            require_page(path)
        else:
            require_writable_file(path, option)
        other = options_by_file.setdefault(Path(path).resolve(), option)
        if other != option:
            raise UsageError(
                f"{option}: expected another file than that of {other}, got {path} for both; "
                "name two files"
            )


def device_named(name: str) -> torch.device:
    """What `auto`, `cpu` or `cuda` means here; raises `UsageError` where it is none of them, or
    there is no GPU.
    """
    import torch

    if name not in DEVICES:
        raise UsageError(f"--device: expected one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device: expected a GPU that torch sees, got none; leave --device out, or pass cpu: "
            "every case runs there too, in plain PyTorch"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _write(options: argparse.Namespace, report: Report) -> None:
    from ..reports import write_json, write_text

    if options.json is not None:
        write_json(Path(options.json), report.content())
    if options.csv is not None:
        write_text(Path(options.csv), report.as_csv())
