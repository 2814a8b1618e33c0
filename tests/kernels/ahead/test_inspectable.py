"""The list of configurations: a case for every gate, and what `sidestream inspect` says of each op.

What the other files of this folder compile is compiled once for all of them.
"""

import pytest

from sidestream.bench.ahead import measuring
from sidestream.kernels import ahead, registry
from sidestream.kernels.ahead import count as counting
from sidestream.tests.kernels import costs

GATED = [row.op for row in registry.ROWS if row.gates]


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch):
    monkeypatch.setattr(ahead.Configuration, "compile", costs.compile_for)


def test_every_op_has_cases_and_every_gate_one():
    cases = [(case.op, case.name) for case in ahead.cases()]
    assert len(set(cases)) == len(cases)
    assert {op for op, _ in cases} == {row.op for row in registry.ROWS}
    assert {(row.op, gate.case) for row in registry.ROWS for gate in row.gates} <= set(cases)
    with pytest.raises(KeyError, match="no case 'absent'"):
        ahead.case_of("cast_", "absent")


def test_every_case_is_of_a_kernel_that_is_launched():
    for case in ahead.cases():
        assert ahead.__name__ not in case.configuration.kernel.fn.__module__, case


def test_a_probe_says_how_many_instructions_and_nothing_else():
    case = ahead.case_of("dequantize_nvfp4_", "te bf16")
    launched = costs.compile_for(case.configuration, "sm_90")
    probe = costs.compile_for(case.counted, "sm_90")
    row = measuring.measure((case.op, case.name, "sm_90"))
    assert row.registers == launched.registers != probe.registers
    assert row.instructions == counting.program_cost(probe, case.elements_per_thread)


@pytest.mark.parametrize("op", GATED)
def test_every_op_can_be_inspected(op):
    """Its first case: the others are measured by the gates, in the same way."""
    gate = registry.row(op).gates[0]
    row = measuring.measure((op, gate.case, "sm_90"))
    assert not row.is_over_its_gate
    assert (row.register_limit, row.instruction_limit) == (gate.registers, gate.instructions)
    assert 0 < row.registers <= 255
    assert 0 < row.occupancy <= 1
    assert row.load_bits[0] == 128
    assert row.store_bits[:1] in ((), (128,))  # an amax and a norm store by atomics, or a scalar
    assert row.instructions > 1
    assert row.moved_bytes >= 2
    assert [found.gpu for found in row.predictions] == ["H100", "H200"]


def test_counts_of_one_path_agree():
    """By the first exit, and by following the branches."""
    compiled = costs.compile_for(ahead.case_of("cast_", "e4m3").configuration, "sm_90")
    ((wide, count),) = counting.wide_paths(compiled)
    assert wide == 6
    assert counting.path_cost(compiled, 32) == counting.wide_path_cost(compiled, 32) == count / 32


def test_a_path_of_each_dtype_is_found_and_the_costliest_counts():
    case = ahead.case_of("pack_", "bf16")
    compiled = costs.compile_for(case.configuration, "sm_90")
    paths = counting.wide_paths(compiled)
    assert [wide for wide, _ in paths] == [3, 4, 4]
    assert case.instructions(compiled) == max(4 * count / (16 * wide) for wide, count in paths)


def test_loops_are_not_counted_as_if_they_ran_once():
    case = ahead.case_of("reduce_", "bf16 -> fp32 world 64")
    compiled = costs.compile_for(case.configuration, "sm_90")
    with pytest.raises(ahead.CountError, match="one path without loops"):
        case.instructions(compiled)
    assert measuring.measure((case.op, case.name, "sm_90")).instructions is None
