"""Candidates change no bit: the tuner's own cases, interpreted, with small and large blocks."""

import pytest
import torch

from sidestream.bench import tunables
from sidestream.kernels import op, tuned

CPU = torch.device("cpu")
MIN_NUMEL = 4096
TUNABLES = tunables.tunables()


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu():
    """Public functions reach the interpreted kernels instead of the definitions."""
    with op.launching_on_cpu():
        yield


def extremes(tunable):
    """The smallest and the largest block; to the interpreter warps are nothing."""
    candidates = sorted(tunable.candidates(), key=tunables.size_of)
    return {one.block_bytes: one for one in (candidates[0], candidates[-1])}.values()


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda tunable: tunable.name.replace(" ", "-"))
def test_every_block_gives_the_bits_of_the_definition(tunable):
    """Of as many elements as make a full block and a tail, unless they are of many tensors."""
    case = tunable.benchmark
    assert case.op == tunable.op
    for config in extremes(tunable):
        numel = max(MIN_NUMEL, config.block_bytes * 5 // 4)
        with tuned.forcing(tunable.op, config) as forced:
            assert case.agrees(CPU, numel), config
        assert forced.asked == {tunable.case: tunable.default}
