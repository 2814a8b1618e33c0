"""Wire messages for pytest-benchmark: packed, packed with noise, unpacked, and two of them summed.

    pytest bench/test_speed/test_messages.py --benchmark-only [-k nvfp4] [--benchmark-json FILE]

One FP32 vector of NUMEL elements, 4 Mi by default, on the CPU with as many threads as THREADS says,
one by default. The JSON has `ns_per_element`, of the fastest round.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from sidestream.kernels import (
    message_layout,
    pack_message_,
    reduce_messages_,
    unpack_message_,
)
from sidestream.kernels.formats.table import MESSAGES

NUMEL = int(os.environ.get("NUMEL", 4 * 1024 * 1024))
THREADS = int(os.environ.get("THREADS", 1))
ROUNDS = 7
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 1}
ACTS = ("pack", "pack with noise", "unpack", "sum of two")


def _calls(name: str) -> dict[str, Callable[[], None]]:
    """The acts, each on the same vector and messages."""
    layout = message_layout(name, [NUMEL])
    vector, out, total = torch.randn(NUMEL), torch.empty(NUMEL), torch.empty(layout.numel)
    messages = torch.empty(2, layout.num_bytes, dtype=torch.uint8)
    for message in messages:
        pack_message_(message, [vector], name)
    return {
        "pack": lambda: pack_message_(messages[0], [vector], name),
        "pack with noise": lambda: pack_message_(messages[0], [vector], name, **NOISE),
        "unpack": lambda: unpack_message_([out], messages[0], name),
        "sum of two": lambda: reduce_messages_(total, messages, name),
    }


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(benchmark: BenchmarkFixture, name: str, act: str) -> None:
    """One act, again and again."""
    if act == "pack with noise" and not MESSAGES[name].has_stochastic:
        pytest.skip(f"{name} is always rounded to nearest")
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        benchmark.group = f"{act}, {NUMEL} elements, {THREADS} threads"
        benchmark.pedantic(_calls(name)[act], rounds=ROUNDS, warmup_rounds=1)
    finally:
        torch.set_num_threads(threads)
    if benchmark.stats is not None:  # it is where nothing is to be timed
        benchmark.extra_info["ns_per_element"] = benchmark.stats.stats.min / NUMEL * 1e9
