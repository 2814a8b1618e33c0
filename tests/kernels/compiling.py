"""Compiles for tests: cases, once a run; JIT functions of tests; and cases beside the tests.

    python -m sidestream.tests.kernels.compiling OP NAME TARGET ...

measures what is named from the end, while the tests begin at the beginning: they find what it kept.
"""

import contextlib
import functools
import subprocess
import sys

import torch

from sidestream.kernels.ahead import measure
from sidestream.kernels.ahead.compile import compile_launch
from sidestream.kernels.cases import case_of
from sidestream.kernels.launch import Launch

VALUES = {
    "*fp32": torch.empty(0),
    "*u8": torch.empty(0, dtype=torch.uint8),
    "*i16": torch.empty(0, dtype=torch.int16),
    "*i32": torch.empty(0, dtype=torch.int32),
    "i32": 0,
    "i64": 1 << 40,
}


def compile_kernel(kernel, signature, constants, target, *, num_warps):
    """A JIT function with arguments of these types."""
    arguments = {name: VALUES[kind] for name, kind in signature.items()}
    return compile_launch(Launch(kernel, 1, arguments, constants, num_warps), target)


@functools.cache
def compiled(op, name, target, numel=None):
    """The kernel of a case that is counted; of many elements, with the paths of what is left."""
    case = case_of(op, name)
    return compile_launch(case.launches(numel)[case.counted], target)


@contextlib.contextmanager
def beside(tasks):
    """Measure the tasks in a process that gives way to others; end it with the block."""
    words = [word for task in tasks for word in task]
    process = subprocess.Popen(["nice", sys.executable, "-m", __name__, *words])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    words = sys.argv[1:]
    for at in range(len(words) - 3, -1, -3):
        op, name, target = words[at : at + 3]
        # Whoever asks for it gets the error.
        with contextlib.suppress(Exception):
            measure.measure(case_of(op, name), target)


if __name__ == "__main__":
    main()
