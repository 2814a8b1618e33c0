"""The table of cases: every op has some, names and bytes are right, the page is fresh."""

import math
import re
from pathlib import Path

import pytest
import torch

from sidestream import kernels
from sidestream.kernels import tuned
from sidestream.kernels.ahead.compile import TARGETS
from sidestream.kernels.cases import case_of, cases, markdown, rows
from sidestream.tests.kernels.wire import toy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
CPU = torch.device("cpu")
STANDARD = [case for case in cases() if case.standard]
BUDGETS = {
    ("quantize_mx_", "e4m3 from bf16"): 8.0,
    ("quantize_mx_", "e2m1 from bf16"): 25.0,
    ("quantize_mx_", "e2m1 from bf16 stochastic"): 32.0,
    ("quantize_nvfp4_", "from bf16"): 25.0,
    ("quantize_nvfp4_", "from bf16 stochastic"): 32.0,
    ("quantize_nvfp4_", "from bf16 hadamard stochastic swizzled"): 32.0,
    ("flat_adamw_", "bf16 to bf16 all options"): 110.0,
}


def registered_ops():
    """Ours, but for that of the tests' own room."""
    names = {name.partition("::") for name in torch._C._dispatch_get_all_op_names()}
    ops = {op for namespace, _, op in names if namespace == "sidestream"}
    return sorted(op for op in ops if not op.startswith("toy_"))


def test_every_op_has_a_row_and_cases_of_which_one_is_standard():
    assert sorted(row.op for row in rows()) == registered_ops()
    assert {case.op for case in STANDARD} == set(registered_ops())


def test_every_row_is_complete_and_its_function_public():
    for row in rows():
        assert all((row.formats, row.moved, row.rounding, row.proof, row.source))
        assert row.function in kernels.__all__
        assert row.op.startswith(row.function)


def test_names_are_unique_and_find_their_case():
    names = [(case.op, case.name) for case in cases()]
    assert len(set(names)) == len(names)
    assert case_of("cast_", "e4m3 from bf16").full_name == "cast e4m3 from bf16"
    with pytest.raises(KeyError, match="no case 'absent'"):
        case_of("cast_", "absent")


def test_worlds_that_are_asked_for_replace_the_usual_ones():
    assert {case.world for case in cases((3, 5))} == {None, 3, 5}


def test_gates_are_there_and_within_the_budgets_of_the_hardware():
    """What an H100 has time for while it moves the bytes, or less."""
    assert sum(case.gate is not None for case in cases()) >= 119
    for name, budget in BUDGETS.items():
        assert case_of(*name).gate.instructions <= budget


def test_shares_of_a_copy_are_less_where_arithmetic_takes_time():
    assert case_of("cast_", "e4m3 from bf16").copy_share == 0.88
    assert case_of("cast_", "e2m1 from bf16").copy_share == 0.70
    assert case_of("cast_", "e2m1 from bf16 stochastic").copy_share == 0.60
    assert case_of("update_fp8_scales_", "max of 16").copy_share is None


@pytest.mark.parametrize("case", STANDARD, ids=lambda case: case.full_name)
def test_a_call_has_the_size_and_the_bytes_that_it_says(case):
    numel = 1 << 17
    operands = case.operands(CPU, numel)
    assert 0.9 * numel <= case.numel(numel) <= 1.1 * numel
    returned = case.call(operands)
    if returned is None:
        made = operands.num_bytes(case.passes)
    else:
        found = list(returned) if isinstance(returned, tuple) else [returned]
        kept = {tensor.data_ptr() for tensor in (*operands.updated, *operands.scalars)}
        new = sum(tensor.nbytes for tensor in found if tensor.data_ptr() not in kept)
        updated = 2 * sum(tensor.nbytes for tensor in operands.updated)
        made = case.passes * sum(tensor.nbytes for tensor in operands.read) + new + updated
    assert made == pytest.approx(case.num_bytes(numel), rel=0.01)


def check_that_all_run():
    """Small enough for all of them: rows of 64 elements. Nothing is allocated within the clock."""
    for case in cases():
        try:
            operands = case.operands(CPU, 192)
            results = case.results(operands)
        except Exception as error:
            error.add_note(case.full_name)
            raise
        given = (*operands.read, *operands.written, *operands.updated, *operands.scalars)
        memory = {tensor.untyped_storage().data_ptr() for tensor in given}
        assert {one.untyped_storage().data_ptr() for one in results} <= memory, case.full_name


def test_every_case_runs_standard_or_not_and_writes_into_its_operands():
    check_that_all_run()


def test_those_of_a_format_from_outside_run():
    with toy.formats():
        found = {case.op for case in cases() if toy.E3M2.name in case.name}
        assert {"cast_", "quantize_mx_", "dequantize_mx_"} <= found
        check_that_all_run()


def test_the_definition_is_the_call_on_a_cpu_with_tensors_that_are_the_same_each_time():
    case = case_of("quantize_mx_", "e2m1 from bf16 stochastic")
    assert case.agrees(CPU, 4096)
    first, second = case.operands(CPU, 4096), case.operands(CPU, 4096)
    assert torch.equal(first.read[0], second.read[0])


def test_nothing_is_launched_or_kept_while_launches_are_recorded():
    case = case_of("quantize_fp8_", "tensor from bf16")
    names = [launch.kernel.fn.__name__ for launch in case.launches()]
    assert names == ["_amax_kernel", "_known_kernel"]
    assert case.agrees(CPU, 4096)


@pytest.mark.parametrize("op", tuned.LIMITS)
def test_launches_follow_a_forced_configuration_and_tell_what_was_asked(op):
    case = next(case for case in STANDARD if case.op == op)
    ((asked, default),) = case.tuned().items()
    assert asked
    usual, forced = case.launches(), case.launches(config=default)
    assert [(one.constants, one.num_warps) for one in usual] == [
        (one.constants, one.num_warps) for one in forced
    ]
    assert math.log2(case.elements_per_thread(usual[case.counted])).is_integer()


def test_the_page_is_fresh():
    page = PAGE.read_text()
    assert page == markdown(), "stale: run make docs"
    for row in rows():
        assert len(re.findall(rf"^\| `{row.function}` \|", page, re.MULTILINE)) >= 1
    assert all(target in page for target in TARGETS)
