"""Runs all tests in two processes side by side, and ends with one line on what came of both.

    python tests/side_by_side.py [options of pytest]

Many tests wait: for ranks, processes, time limits. `BESIDE` is about half of them by time. What
runs beside is printed when both have ended, or when an interrupt or a limit of time ends them.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

BESIDE = (
    "kernels",
    "bench",
    "training",
    "examples",
    "integrations",
    "sharding/checkpoint",
    "sharding/optim",
)
REGULAR_ENDS = (0, 1)
END_S = 10.0


def main(folder: Path, options: list[str]) -> int:
    """Run what is in `folder`; return the exit status that pytest gave for either half."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.monotonic()
    beside = [str(path) for name in BESIDE if (path := folder / name).exists()]
    rest = [str(folder), *(f"--ignore={path}" for path in beside)]
    with tempfile.TemporaryDirectory(prefix="sidestream-tests-") as results:
        reports = [f"{results}/beside.xml", f"{results}/rest.xml"]
        commands = [
            # -P: not with the checkout's folders as packages of their own.
            [sys.executable, "-P", "-m", "pytest", *paths, f"--junitxml={report}", *options]
            for paths, report in zip((beside, rest), reports, strict=True)
        ]
        with open(f"{results}/output", "w+") as output:
            # Of the two, only one may write what failed last.
            first = [*commands[0], "-p", "no:cacheprovider"]
            with subprocess.Popen(first, stdout=output, stderr=subprocess.STDOUT) as process:
                try:
                    status = subprocess.run(commands[1], check=False).returncode
                    process.wait()
                except BaseException:
                    process.send_signal(signal.SIGINT)  # pytest writes what there is
                    raise
                finally:
                    _end(process)
                    output.seek(0)
                    print(output.read(), flush=True)
        counts = sum((_counts(report) for report in reports), Counter())
    kinds = [kind for kind in ("failed", "passed", "skipped") if counts[kind]]
    codes = (process.returncode, status)
    ends = [f"a half ended with {code}" for code in codes if code not in REGULAR_ENDS]
    told = ", ".join([*ends, *(f"{counts[kind]} {kind}" for kind in kinds)])
    print(f" {told} in {time.monotonic() - started:.0f} s ".center(80, "="))
    return status or process.returncode


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
