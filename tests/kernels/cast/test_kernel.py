"""Compiles the conversions for six GPUs and holds them to widths, spills and instruction counts."""

from functools import partial

import pytest

from sidestream.kernels.ahead import casts
from sidestream.kernels.cast import kernel as cast_kernels
from sidestream.kernels.cast import op as cast_ops
from sidestream.tests.kernels import costs
from sidestream.tests.kernels.costs import widths

IDS = [f"{to}-{'stochastic' if stochastic else 'nearest'}" for to, stochastic in casts.MODES]


def compile_cast(target, to, stochastic, source="*bf16"):
    return costs.compile_for(casts.cast_configuration(to, stochastic, source), target)


def compile_cast_back(target, from_, out="*bf16"):
    return costs.compile_for(casts.cast_back_configuration(from_, out), target)


def compiled_ahead():
    calls = [partial(compile_cast, "sm_90", *mode) for mode in casts.MODES]
    calls += [partial(compile_cast_back, "sm_90", name) for name in cast_ops.DTYPES]
    return calls + [partial(compile_some, target) for target in costs.OTHERS]


@pytest.mark.parametrize(("to", "stochastic"), casts.MODES, ids=IDS)
def test_cast_on_hopper(to, stochastic):
    compiled, found = costs.measure_case("cast_", to + " stochastic" * stochastic)
    assert found == []
    assert widths(compiled, cast_kernels._cast_full_block) == [{128}, {128}]


@pytest.mark.parametrize("from_", cast_ops.DTYPES)
def test_cast_back_on_hopper(from_):
    compiled, found = costs.measure_case("cast_back_", from_)
    assert found == []
    assert widths(compiled, cast_kernels._cast_back_full_block) == [{128}, {128}]


def compile_some(target):
    """Every branch of the kernels, but not every format: `test_device_codes` has those."""
    return [
        compile_cast(target, "e4m3", False, "*fp32"),
        compile_cast(target, "e2m1", True, "*fp32"),
        compile_cast_back(target, "e2m1"),
    ]


@pytest.mark.parametrize("target", costs.OTHERS)
def test_other_targets_compile_without_spills(target):
    made = compile_some(target)
    assert [compiled.spill_bytes for compiled in made] == [0] * len(made)
    assert all(compiled.registers for compiled in made)


def test_full_blocks_are_wide_on_amd():
    """A thread has 8 bytes of e2m1 there. A load may carry the line that converts what it loads."""
    functions = (cast_kernels._cast_full_block, cast_kernels._cast_back_full_block)
    for compiled in compile_some("gfx942"):
        accesses = compiled.accesses_of(*functions)
        assert {access.bits for access in accesses} <= {64, 128}
        assert not all(access.is_load for access in accesses)
        assert max(access.bits for access in compiled.accesses if access.is_load) >= 64
