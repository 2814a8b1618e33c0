"""Owns the process that compiles, from the end, what the tests compile from the beginning.

A file of tests that has a function `compiled_ahead` names the calls. What they make lies in
Triton's cache on disk, where the tests find it. A process, since Python's parser, by which Triton
reads kernels, fails when two threads use it at once (Python 3.11). It gives way to the tests, which
come to what is compiled last, and takes the time in which they leave a core idle.
"""

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def running(modules: Sequence[str]) -> Iterator[None]:
    """Begin at once with the last of `modules`, names of modules; end with the block."""
    process = subprocess.Popen(["nice", sys.executable, "-m", __name__, *modules])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    for name in reversed(sys.argv[1:]):
        for call in reversed(importlib.import_module(name).compiled_ahead()):
            # Whoever asks for it gets the error.
            with contextlib.suppress(Exception):
                call()


if __name__ == "__main__":
    main()
