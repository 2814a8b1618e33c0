"""A new format is a row of the table and one file: a registered one goes everywhere, and leaves."""

import pytest
import torch

from sidestream import kernels as k
from sidestream.kernels.ahead.compile import compile_launch
from sidestream.kernels.wire import cases
from sidestream.tests.kernels.wire import toy


@pytest.mark.parametrize("check", toy.CHECKS)
def test_on_the_cpu(check):
    with toy.formats():
        toy.CHECKS[check]()


def test_its_cases_are_there_and_compile_for_hopper():
    """Nobody lists formats besides the table: gates and benchmarks have this one as well."""
    with toy.formats():
        found = {case.op: case for case in cases.cases() if case.format == toy.TOY.name}
        assert set(found) == {
            *("pack_message_", "unpack_message_", "reduce_messages_", "reduce_peer_messages_")
        }
        for case in found.values():
            for launch in case.launches():
                compiled = compile_launch(launch, "sm_90")
                assert compiled.registers > 0
                assert compiled.spill_bytes == 0


def test_it_is_gone_afterwards():
    with toy.formats():
        assert k.message_layout("toy", [1]).numel == 128
    with pytest.raises(ValueError, match=r"format: expected one of fp32.* nvfp4, got 'toy'"):
        k.message_layout("toy", [1])
    with pytest.raises(ValueError, match=r"rule: expected one of rceil.* even, got 'generous'"):
        k.quantize_mx(torch.ones(32), rule="generous")
    with pytest.raises(ValueError, match=r"to: expected one of bf16.* e4m3fnuz, got 'e3m2'"):
        k.cast(torch.ones(32), "e3m2")
