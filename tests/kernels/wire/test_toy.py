"""A new format is a row of the table and one file: a registered one goes everywhere, and leaves."""

import pytest
import torch

from sidestream import kernels as k
from sidestream.tests.kernels.wire import toy


@pytest.mark.parametrize("check", toy.CHECKS)
def test_on_the_cpu(check):
    with toy.formats():
        toy.CHECKS[check]()


def test_it_is_gone_afterwards():
    with toy.formats():
        assert k.message_layout("toy", [1]).numel == 128
    with pytest.raises(ValueError, match=r"format: expected one of fp32.* nvfp4, got 'toy'"):
        k.message_layout("toy", [1])
    with pytest.raises(ValueError, match=r"rule: expected one of rceil.* even, got 'generous'"):
        k.quantize_mx(torch.ones(32), rule="generous")
