"""The standard cases of `sidestream bench kernels` for pytest-benchmark, ours and every rival.

    pytest bench/ --benchmark-only [-k pack] [--benchmark-json FILE]

NUMEL and DEVICE in the environment change the size and the device. A wrong result fails instead of
being timed. On a GPU a call includes waiting for it: `sidestream bench kernels` does not.
"""

import argparse
import itertools
import os

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sidestream.bench.clocks import clock_of, rotation_of
from sidestream.bench.commands.kernels import device_named
from sidestream.bench.commands.parsing import size
from sidestream.bench.kernel_cases import parts
from sidestream.bench.kernel_cases.candidates import candidates_of
from sidestream.bench.kernel_cases.packages import quiet
from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.training.errors import UsageError


def _settings() -> tuple[torch.device, int]:
    device, numel = os.environ.get("DEVICE", "auto"), os.environ.get("NUMEL", "256k")
    try:
        return device_named(device), size(numel)
    except (UsageError, argparse.ArgumentTypeError) as error:
        message = f"DEVICE={device} NUMEL={numel} in the environment: {error}"
        raise pytest.Collector.CollectError(message) from None


DEVICE, NUMEL = _settings()
ROUNDS = 15
CASES = {case.full_name: case for case in select(Selection())}
CANDIDATES = {name: candidates_of(case, compiled=False) for name, case in CASES.items()}


@pytest.mark.parametrize(
    ("name", "candidate"),
    [(name, candidate) for name, found in CANDIDATES.items() for candidate in found],
    ids=str,
)
def test_speed(benchmark: BenchmarkFixture, name: str, candidate: str) -> None:
    """One call at a time, each on other memory than the one before."""
    case = CASES[name]
    assert case.agrees(DEVICE, min(NUMEL, 64 * 1024)), "not the bits of its definition"
    clock, operands = clock_of(DEVICE), case.operands(DEVICE, NUMEL)
    assert parts.fault(case, operands) is None
    rotation = rotation_of(operands, clock.cache_bytes)
    try:
        with quiet():
            runs = [CANDIDATES[name][candidate](operands) for operands in rotation]
    except ImportError as error:
        pytest.skip(f"{candidate}: {error}")
    turns = itertools.cycle(runs)

    def call() -> None:
        next(turns)()
        clock.synchronize()

    benchmark.group = f"{name}, {case.numel(NUMEL)} elements"
    benchmark.extra_info.update(op=case.op, num_bytes=case.num_bytes(NUMEL), device=str(DEVICE))
    benchmark.pedantic(call, rounds=ROUNDS, warmup_rounds=min(len(runs), 3))
