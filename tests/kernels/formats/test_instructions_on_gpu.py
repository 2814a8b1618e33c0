"""Conversions of E2M1 by a GPU's instructions against arithmetic on it, for every FP32."""

import pytest
import torch

from sidestream.kernels import launch
from sidestream.kernels.formats import codes
from sidestream.kernels.formats.table import E2M1
from sidestream.tests.kernels.formats import code_probes

pytestmark = pytest.mark.gpu

CHUNK = 2**26
ROWS = 128


def converted(values, level):
    """Words of eight codes, and what they decode to."""
    words = torch.zeros(len(values) // 8, dtype=torch.int32, device="cuda")
    again = torch.full_like(values, 1.5)
    code_probes.word_probe[(len(values) // (32 * ROWS),)](
        values, words, again, HARDWARE=level, ROWS=ROWS, enable_fp_fusion=False
    )
    return words, again.view(torch.int32)


@pytest.mark.parametrize("wanted", [launch.FP8, launch.FP4], ids=["FP8", "FP4"])
def test_instructions_are_the_arithmetic_for_every_fp32(wanted):
    """Hopper decodes by instructions, Blackwell encodes and decodes by its own."""
    level = launch.hardware_on(torch.device("cuda", torch.cuda.current_device()))
    if level < wanted:
        pytest.skip(f"expected a GPU of level {wanted}, got one of {level}")
    for first in range(-(2**31), 2**31, CHUNK):
        words = torch.arange(first, first + CHUNK, dtype=torch.int32, device="cuda")
        values = words.view(torch.float32)
        found, expected = converted(values, wanted), converted(values, 0)
        assert all(map(torch.equal, found, expected)), hex(first)
        if first in (-(2**31), 0):  # and the arithmetic is the definition
            stored = codes.stored(values.cpu().view(-1, 8), E2M1)
            assert torch.equal(found[0].cpu().view(torch.uint8), stored.view(-1))
