"""Compiles the device functions for six GPUs; where the hardware converts, it must.

What they cost an element, the gates of the kernels that use them tell.
"""

import pytest

from sidestream.kernels.ahead.compile import HARDWARE_FP8, TARGETS
from sidestream.tests.kernels.compiling import compile_kernel
from sidestream.tests.kernels.formats import code_probes


def compile_probes(target):
    """What encodes, and what decodes."""
    pointers = {"values": "*fp32", "found": "*u8", "rounded": "*i16", "noise": "*i32"}
    options = {"HARDWARE": target in HARDWARE_FP8}
    encoded = compile_kernel(
        code_probes.encode_probe,
        {**pointers, "seed": "i64", "first": "i64"},
        options | {"BLOCK": 512},
        target,
        num_warps=4,
    )
    decoded = compile_kernel(
        code_probes.decode_probe, {"codes": "*u8", "found": "*fp32"}, options, target, num_warps=4
    )
    return encoded, decoded


@pytest.mark.parametrize("target", TARGETS)
def test_every_function_compiles(target):
    """With the hardware's conversions where there are any; E5M2's saturate as E4M3's do."""
    encoded, decoded = compile_probes(target)
    assert encoded.spill_bytes == decoded.spill_bytes == 0
    if target in HARDWARE_FP8:
        for element in ("E4M3", "E5M2"):
            assert f"F2FP.SATFINITE.{element}.F32" in encoded.assembly
