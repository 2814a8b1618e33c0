"""A new kernel is four files of a room: what reads the table of cases needs no other word of it."""

import dataclasses

import pytest
import torch

from sidestream.bench import kernel_table
from sidestream.kernels.ahead import measure
from sidestream.kernels.ahead.compile import TARGETS
from sidestream.kernels.case import GATED_TARGET
from sidestream.tests.kernels.toy_room.cases import CASE
from sidestream.tests.kernels.toy_room.op import negate_

CPU = torch.device("cpu")


def test_what_is_launched_is_recorded_and_arguments_are_checked():
    (launch,) = CASE.launches()
    assert CASE.elements_per_thread(launch) == 8
    (launch,) = CASE.launches(numel=5000)
    assert launch.programs == 5
    x = torch.tensor([1.0, -0.0, float("inf")])
    out = torch.empty(3)
    negate_(out, x)
    assert out.tolist() == [-1.0, 0.0, float("-inf")]
    with pytest.raises(ValueError, match="out"):
        negate_(x, x)


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_compiled_and_held_to_its_gate(target):
    found = measure.measure(CASE, target)
    assert (found.spill_bytes, found.load_bits[0], found.store_bits[0]) == (0, 128, 128)
    if target == GATED_TARGET:
        assert found.faults(CASE.gate) == []
        assert found.wide_bytes == CASE.moved_bytes


def test_the_benchmark_times_it_beside_a_copy():
    pace = dataclasses.replace(kernel_table.pace_of(CPU, compiled=False), seconds=0.01)
    measured = kernel_table.measure([CASE], [4096], CPU, pace, lambda text: None)
    assert not measured.wrong
    (row,) = measured.rows
    assert (row.case, row.candidate, row.num_bytes) == ("toy_negate fp32", "sidestream", 32768)
    assert row.gb_per_s > 0
