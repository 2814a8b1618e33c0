"""What a rate is held against moves every number, also those of a last block that is not full."""

import pytest
import torch

from sidestream.bench import bandwidth_kernels


@pytest.mark.parametrize("numel", [16, 4096, 4096 + 16], ids="{} numbers".format)
def test_all_of_it_is_copied_and_read(numel):
    source = torch.arange(1, numel + 1).float()
    target = torch.zeros(numel)
    bandwidth_kernels.copy_(target, source)
    assert torch.equal(target, source)
    sums = torch.zeros(bandwidth_kernels.num_programs(source))
    bandwidth_kernels.read_(sums, torch.ones(numel))
    assert sums.sum() == numel
