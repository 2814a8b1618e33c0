"""Conversions of E2M1 by NVIDIA's instructions, whose PTX runs in a model, against arithmetic.

`ptx` has the model. `formats/test_instructions_on_gpu.py` compares the same on a GPU.
"""

import numpy as np
import pytest
import torch

from sidestream.kernels import launch
from sidestream.kernels.cases import case_of
from sidestream.kernels.formats import codes
from sidestream.kernels.formats.table import E2M1
from sidestream.kernels.op import launching_on_cpu
from sidestream.tests.kernels import ptx
from sidestream.tests.kernels.formats import code_cases, code_probes
from sidestream.tests.kernels.oracle import assert_same_bits

LEVELS = pytest.mark.parametrize("level", [0, launch.FP8, launch.FP4], ids=["-", "FP8", "FP4"])
NUMEL = 2 * 4096 + 544  # two tiles and a part
WORD_CODES = 8
# Every kernel that converts words of E2M1, either way; grouped casts do it by others' functions.
CASES = (
    ("cast_", "e2m1 from bf16"),
    ("cast_back_", "e2m1 to bf16"),
    ("quantize_mx_", "e2m1 from bf16"),
    ("quantize_mx_", "e2m1 from bf16 stochastic"),
    ("dequantize_mx_", "e2m1 to bf16"),
    ("quantize_nvfp4_", "from bf16"),
    ("dequantize_nvfp4_", "to bf16"),
    ("quantize_mx_with_transpose_", "e2m1 from bf16"),
    ("quantize_nvfp4_with_transpose_", "from bf16"),
    ("pack_message_", "mxfp4 from bf16"),
    ("pack_message_", "nvfp4 from bf16"),
    ("unpack_message_", "nvfp4 to bf16"),
    ("reduce_messages_", "mxfp4 to fp32 world 8 scaled"),
)


@pytest.fixture(autouse=True)
def _modelled():
    with ptx.modelled():
        yield


def converted(values, level):
    """Codes in bytes of two, and what they decode to; `values` filled up to whole rows."""
    rows = 1 << (-(-len(values) // 32) - 1).bit_length()
    values = torch.nn.functional.pad(values, (0, rows * 32 - len(values))).view(rows, 32)
    words = torch.zeros((rows, 4), dtype=torch.int32)
    again = torch.full((rows, 32), 1.5)
    code_probes.word_probe[(1,)](values, words, again, HARDWARE=level, ROWS=rows)
    return values, words.view(torch.uint8), again


@LEVELS
def test_every_kind_of_number(level):
    """Every BF16, what lies on and beside a boundary, NaNs, infinities, subnormals."""
    values, packed, again = converted(code_cases.inputs(E2M1), level)
    assert torch.equal(packed, codes.stored(values, E2M1))
    assert_same_bits(again, codes.loaded(packed, E2M1))


@LEVELS
def test_every_code_at_every_place_of_a_word(level):
    """Each of a word's halves has all of its 2^16 values."""
    low = torch.arange(2**16)
    words = (low | (low * 40503 % 2**16) << 16).to(torch.uint32).view(torch.uint8)
    values = codes.loaded(words, E2M1)
    _, packed, again = converted(values, level)
    assert torch.equal(packed.view(-1), words)
    assert_same_bits(again.view(-1), values)


@pytest.mark.parametrize("level", [launch.FP8, launch.FP4], ids=["FP8", "FP4"])
@pytest.mark.parametrize(("op", "name"), CASES, ids=map(" ".join, CASES))
def test_kernels(op, name, level, monkeypatch):
    case = case_of(op, name)
    numel = case.numel(NUMEL)
    expected = case.operands(torch.device("cpu"), numel)
    found = expected.copied()
    monkeypatch.setattr(launch, "hardware_on", lambda _: level)
    with launching_on_cpu():
        results = case.results(found)
    for one, other in zip(results, case.results(expected), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sign", [0, 1 << 31], ids=["+", "-"])
def test_the_model_is_the_arithmetic_for_every_number_from_a_sixteenth_to_sixteen(sign):
    """Below and above, all that codes can differ in, each 128th of the others as well."""
    every = [(first, 1) for first in range(0x3D80_0000, 0x4180_0000, 2**23)]
    for first, step in (*every, *((first, 128) for first in range(0, 2**31, 2**30))):
        words = np.arange(first, first + 2**23 * step, step, dtype=np.uint32) | np.uint32(sign)
        expected = codes.encode(torch.from_numpy(words.view(np.float32)), E2M1)
        assert np.array_equal(ptx.e2m1_of(words), expected.numpy()), hex(first)
