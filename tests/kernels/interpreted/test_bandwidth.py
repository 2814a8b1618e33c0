"""What a rate is held against moves every number."""

import torch

from sidestream.bench import bandwidth_kernels
from sidestream.bench.bandwidth import BLOCK_NUMEL


def test_all_of_it_is_copied_and_read():
    source = torch.arange(1, 2 * BLOCK_NUMEL + 1).float()
    target = torch.zeros_like(source)
    bandwidth_kernels.copy_(target, source)
    assert torch.equal(target, source)
    sums = torch.zeros(2)
    bandwidth_kernels.read_(sums, torch.ones_like(source))
    assert torch.equal(sums, torch.full((2,), float(BLOCK_NUMEL)))
