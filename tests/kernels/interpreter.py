"""The process that runs `interpreted/`: Triton interprets or compiles, never both in one."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"
LIMIT_S = 590


def num_tests() -> int:
    """Test functions in the folder, each of which makes at least one test."""
    sources = [path.read_text() for path in FOLDER.glob("test_*.py")]
    return sum(len(re.findall(r"^def test_", source, re.MULTILINE)) for source in sources)


@contextlib.contextmanager
def running() -> Iterator[Callable[[], tuple[int, str]]]:
    """Begin at once; what is yielded waits for the exit status and all of the output."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )

        def result() -> tuple[int, str]:
            status = process.wait(timeout=LIMIT_S)
            output.seek(0)
            return status, output.read()

        try:
            yield result
        finally:
            process.kill()
            process.wait()
