"""The standard cases of `sidestream bench kernels` for pytest-benchmark, ours and every rival.

    pytest bench/ --benchmark-only [-k pack] [--benchmark-json FILE]

NUMEL and DEVICE in the environment change the size and the device. A wrong result fails instead of
being timed. On a GPU a call includes waiting for it: `sidestream bench kernels` does not.
"""

import itertools
import os

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sidestream.bench.clocks import clock_of, num_rotated
from sidestream.bench.kernel_cases.rivals import quiet
from sidestream.bench.kernel_cases.selection import Selection, select

DEVICE = torch.device(os.environ.get("DEVICE", "cuda" if torch.cuda.is_available() else "cpu"))
NUMEL = int(os.environ.get("NUMEL", 256 * 1024))
ROUNDS = 15
CASES = {case.name: case for case in select(Selection())}


@pytest.mark.parametrize(
    ("name", "candidate"),
    [(name, candidate) for name, case in CASES.items() for candidate in case.candidates],
    ids=str,
)
def test_speed(benchmark: BenchmarkFixture, name: str, candidate: str) -> None:
    """One call at a time, each on other memory than the one before."""
    case = CASES[name]
    assert case.agrees(DEVICE, min(NUMEL, 64 * 1024)), "not the bits of its definition"
    clock, num_bytes = clock_of(DEVICE), case.num_bytes(NUMEL)
    first = case.operands(DEVICE, NUMEL)
    count = num_rotated(num_bytes, clock.cache_bytes)
    rotated = [first, *(first.copied() for _ in range(count - 1))]
    try:
        with quiet():
            runs = [case.candidates[candidate](operands) for operands in rotated]
    except ImportError:
        pytest.skip(f"{candidate} is not installed")
    turns = itertools.cycle(runs)

    def call() -> None:
        next(turns)()
        clock.synchronize()

    benchmark.group = f"{case.name}, {case.numel(NUMEL)} elements"
    benchmark.extra_info.update(op=case.op, num_bytes=num_bytes, device=str(DEVICE))
    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=min(len(runs), 3))
