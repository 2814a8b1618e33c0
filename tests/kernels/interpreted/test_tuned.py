"""Candidates change no bit: the tuner's own cases, interpreted, with small and large blocks."""

import pytest
import torch

from sidestream.bench import sweep, tuning
from sidestream.kernels import tuned
from sidestream.kernels.case import same
from sidestream.kernels.op import launching_on_cpu

CPU = torch.device("cpu")
MIN_NUMEL = 4096


def extremes(tunable):
    """The smallest and the largest block; to the interpreter warps are nothing."""
    candidates = sorted(tunable.candidates(), key=sweep.size_of)
    return {one.block_bytes: one for one in (candidates[0], candidates[-1])}.values()


@pytest.mark.parametrize(
    "tunable", tuning.tunables(), ids=lambda tunable: tunable.name.replace(" ", "-")
)
def test_every_block_gives_the_bits_of_the_definition(tunable):
    """Of as many elements as make a full block and a tail, unless they are of many tensors."""
    case = tunable.case
    for config in extremes(tunable):
        operands = case.operands(CPU, max(MIN_NUMEL, config.block_bytes * 5 // 4))
        expected = case.results(operands.copied())
        with tuned.forcing(tunable.op, config) as forced, launching_on_cpu():
            assert same(case.results(operands), expected), config
        assert forced.asked == {tunable.key: tunable.default}
