"""A kernel of four files, interpreted: full blocks, a tail, unaligned memory."""

import pytest
import torch

from sidestream.kernels.op import launching_on_cpu
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.toy_room import op, reference


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("numel", [1, 1023, 2048, 5000])
def test_bits_are_the_definition_s(numel, start):
    x = oracle.values(numel + start, torch.float32, seed=numel)[start:]
    out, expected = torch.full((numel + 1,), 7.0), torch.empty(numel)
    reference.negate_(expected, x)
    with launching_on_cpu():
        op.negate_(out[:numel], x)
    assert torch.equal(out[:numel].view(torch.int32), expected.view(torch.int32))
    assert out[numel] == 7.0
