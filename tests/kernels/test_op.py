"""Which implementation of an op runs on a CPU."""

import pytest
import torch

from sidestream.kernels import pack_
from sidestream.kernels.launch import recorded
from sidestream.kernels.op import launching_on_cpu


def launches_now():
    """How many kernels `pack_` launches for CPU tensors; none is the definition."""
    flat = torch.zeros(128)
    with recorded() as record:
        pack_(flat, [torch.ones(128)], [0])
    assert flat.eq(not record).all()
    return len(record)


def test_a_cpu_runs_the_definition_but_within_a_block():
    assert launches_now() == 0
    with launching_on_cpu(), launching_on_cpu():
        assert launches_now() == 1
    assert launches_now() == 0


def test_a_block_within_another_ends_alone():
    with launching_on_cpu():
        with launching_on_cpu():
            pass
        assert launches_now() == 1


def test_blocks_that_overlap_leave_nothing_behind():
    """As those of two threads may: the first to begin is the first to end."""
    first, second = launching_on_cpu(), launching_on_cpu()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert launches_now() == 1
    second.__exit__(None, None, None)
    assert launches_now() == 0


def test_an_error_ends_a_block():
    with pytest.raises(KeyError), launching_on_cpu():
        raise KeyError
    assert launches_now() == 0
