"""Every op against its definition, on sizes with tails and on memory that begins late.

Made to be run under compute-sanitizer, which sees what lies outside of it:

    compute-sanitizer --tool memcheck python3 -m pytest -m sanitized -k cuda \
        tests/kernels/test_awkward_memory.py
"""

import pytest
import torch

from sidestream.kernels.case import Operands, same
from sidestream.kernels.cases import cases

pytestmark = pytest.mark.sanitized

CPU = torch.device("cpu")
CASES = [case for case in cases() if case.standard]
# Short rows that no block divides, less than a tile and more, a tile and a tail, many tensors.
NUMELS = (111, 3090, 4097, 70_001)


def begun_late(operands, shift):
    """The same values, each tensor in memory of its own that begins so many elements late."""

    def moved(tensors):
        for tensor in tensors:
            memory = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype, device=tensor.device)
            yield memory[shift:].view(tensor.shape).copy_(tensor)

    return Operands(
        read=moved(operands.read),
        written=moved(operands.written),
        updated=moved(operands.updated),
        scalars=operands.scalars,
    )


def require_calls(device):
    """Not every machine lets a sanitizer watch its GPU."""
    try:
        torch.ones(1, device=device).add_(1.0).cpu()
    except RuntimeError as error:
        pytest.skip(f"{device} takes no calls: {error}")


@pytest.mark.parametrize(
    ("device", "shift"),
    [
        pytest.param("cpu", 1, id="cpu-late"),
        pytest.param("cuda", 0, id="cuda-aligned", marks=pytest.mark.gpu),
        pytest.param("cuda", 1, id="cuda-late", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.full_name)
def test_op(case, device, shift):
    require_calls(device)
    for numel in NUMELS if device == "cuda" else NUMELS[:-1]:
        expected = case.operands(CPU, numel)
        found = begun_late(expected.copied(device), shift)
        assert same(case.results(found), case.results(expected)), numel


def test_every_op_has_a_case_here():
    assert {case.op for case in CASES} == {case.op for case in cases()}
