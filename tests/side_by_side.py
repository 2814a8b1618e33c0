"""Runs all tests in three processes side by side, and ends with one line on what came of them.

    python tests/side_by_side.py [options of pytest]

Many tests wait: for ranks, processes, time limits. Each of `BESIDE` is about a third of them by
time. What runs beside is printed when all have ended, or when an interrupt or a limit of time ends
them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

BESIDE = (
    (
        *("kernels", "bench", "examples", "integrations", "sharding/test_quantised_wires.py"),
        *("sharding/fp8", "sharding/safetensors", "sharding/test_data_parallel.py"),
        *("sharding/test_torch_fully_sharded.py", "sharding/test_expert_ranks.py"),
    ),
    (
        *("training", "sharding/checkpoint", "sharding/optim"),
        *("sharding/torch_state_dict", "sharding/modules"),
        *("sharding/tensor", "sharding/test_compile.py"),
        *("sharding/test_stream_lane.py", "sharding/test_ranks_that_differ.py"),
        "sharding/test_lifecycle.py",
    ),
)
REGULAR_ENDS = (0, 1)
# Threads that spin until others have done their share keep the cores from those: one file of tests
# took twice the processor's time.
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
END_S = 10.0


def main(folder: Path, options: list[str]) -> int:
    """Run what is in `folder`; return the exit status that pytest gave for one of the thirds."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    beside = [[str(path) for name in names if (path := folder / name).exists()] for names in BESIDE]
    beside = [paths for paths in beside if paths]
    rest = [str(folder), *(f"--ignore={path}" for paths in beside for path in paths)]
    with tempfile.TemporaryDirectory(prefix="sidestream-tests-") as results:
        reports = [f"{results}/{number}.xml" for number in range(len(beside) + 1)]
        *first, last = (
            # -P: not with the checkout's folders as packages of their own.
            [sys.executable, "-P", "-m", "pytest", *paths, f"--junitxml={report}", *options]
            for paths, report in zip((*beside, rest), reports, strict=True)
        )
        codes = _run(first, last, Path(results))
        counts = sum((_counts(report) for report in reports), Counter())
    kinds = [kind for kind in ("failed", "passed", "skipped") if counts[kind]]
    ends = [f"a third ended with {code}" for code in codes if code not in REGULAR_ENDS]
    told = ", ".join([*ends, *(f"{counts[kind]} {kind}" for kind in kinds)])
    print(f" {told} in {time.monotonic() - started:.0f} s ".center(80, "="))
    return next((code for code in codes if code), 0)


def _run(first: list[list[str]], last: list[str], results: Path) -> list[int]:
    """Run all commands at once, and print what `first` wrote in the end; their exit statuses."""
    with contextlib.ExitStack() as opened:
        outputs = [
            opened.enter_context((results / f"{number}.txt").open("w+"))
            for number in range(len(first))
        ]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for command, output in zip(first, outputs, strict=True):
                # Of all, only one may write what failed last.
                command = [*command, "-p", "no:cacheprovider"]
                started = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT
                )
                processes.append(started)
            status = subprocess.run(last, check=False, env=ENVIRONMENT).returncode
            codes = [process.wait() for process in processes]
        except BaseException:
            for process in processes:
                process.send_signal(signal.SIGINT)  # pytest writes what there is
            raise
        finally:
            for process in processes:
                _end(process)
            for output in outputs:
                output.seek(0)
                print(output.read(), flush=True)
    return [*codes, status]


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _counts(report: str) -> Counter[str]:
    """Tests by what came of them; none where pytest ended before it wrote its report."""
    if not Path(report).exists():
        return Counter()
    (suite,) = ElementTree.parse(report).getroot()
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    skipped = int(suite.attrib["skipped"])
    passed = int(suite.attrib["tests"]) - failed - skipped
    return Counter(failed=failed, passed=passed, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent, sys.argv[1:]))
