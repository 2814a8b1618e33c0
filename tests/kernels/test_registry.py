"""The registry: a row an op, an op a row, every gate measured by a test, a page that is fresh."""

import re
from pathlib import Path

import pytest
import torch

from sidestream import kernels
from sidestream.kernels import registry
from sidestream.kernels.ahead import compile as aot
from sidestream.tests.kernels import costs

FOLDER = Path(__file__).parent
ROOT = FOLDER.resolve().parents[1]


def registered_ops():
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.partition("::")[2] for name in names if name.startswith("sidestream::")})


def test_every_op_has_a_row_and_every_row_an_op():
    assert len(registry.ROWS) > 10
    assert sorted(row.op for row in registry.ROWS) == registered_ops()


def test_every_row_s_function_is_public():
    for row in registry.ROWS:
        assert row.function in kernels.__all__
        assert callable(getattr(kernels, row.function))
        assert row.op.startswith(row.function)


def test_rows_are_complete_and_gates_have_one_name():
    for row in registry.ROWS:
        assert all((row.formats, row.moved, row.rounding, row.proof, row.source))
        cases = [gate.case for gate in row.gates]
        assert len(set(cases)) == len(cases)
        for gate in row.gates:
            assert registry.gate(row.op, gate.case) is gate
    with pytest.raises(KeyError, match="no gate 'absent'"):
        registry.gate("pack_", "absent")


def test_the_gates_are_within_the_budgets_of_the_hardware():
    """What an H100 has time for while it moves the bytes, or less."""
    for op, case, budget in (
        ("quantize_mx_", "e4m3", 8.0),
        ("quantize_mx_", "e2m1", 25.0),
        ("quantize_mx_", "e2m1 stochastic", 32.0),
        ("quantize_nvfp4_", "nearest", 25.0),
        ("quantize_nvfp4_", "stochastic", 32.0),
        ("quantize_nvfp4_", "hadamard stochastic swizzled", 32.0),
        ("flat_adamw_", "bf16 -> bf16", 110.0),
    ):
        assert registry.gate(op, case).instructions <= budget


def test_every_gate_is_measured(request):
    """By the tests that ran before this one, so it says something in a run of all of them only."""
    files = {
        path.name
        for path in FOLDER.glob("test_*.py")
        if re.search(r"costs\.measure(_case)?\(", path.read_text())
    }
    selected = {item.path.name for item in request.session.items}
    if request.config.option.keyword or not files <= selected:
        pytest.skip("a run of some of the tests")
    gates = {(row.op, gate.case) for row in registry.ROWS for gate in row.gates}
    assert costs.measured() == gates


def test_the_page_is_fresh():
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page == registry.markdown(), "stale: run make docs"
    for row in registry.ROWS:
        assert len(re.findall(rf"^\| `{row.function}` \|", page, re.MULTILINE)) >= 1
    assert all(target in page for target in aot.TARGETS)
