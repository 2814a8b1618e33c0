"""Compiles the device functions for six GPUs; where the hardware converts, it must.

What they cost an element, the gates of the kernels that use them tell.
"""

import pytest

from sidestream.kernels.ahead.compile import HARDWARE_OF, TARGETS
from sidestream.kernels.formats.device_table import element_of
from sidestream.kernels.formats.table import E4M3, E5M2, ELEMENT_FORMATS
from sidestream.tests.kernels.compiling import compile_kernel
from sidestream.tests.kernels.formats import code_probes


@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("target", TARGETS)
def test_every_function_compiles(target, element):
    """With the hardware's conversions where there are any; E5M2's saturate as E4M3's do."""
    options = {"HARDWARE": HARDWARE_OF[target], "ELEMENT": element_of(element)}
    encoded = compile_kernel(
        code_probes.encode_probe,
        {"values": "*fp32", "found": "*u8", "noise": "*i32", "seed": "i64", "first": "i64"},
        options | {"BLOCK": 512},
        target,
        num_warps=4,
    )
    decoded = compile_kernel(
        code_probes.decode_probe, {"codes": "*u8", "found": "*fp32"}, options, target, num_warps=4
    )
    assert encoded.spill_bytes == decoded.spill_bytes == 0
    converted = f"F2FP.SATFINITE.{element.name.upper()}.F32" in encoded.assembly
    assert converted == (HARDWARE_OF[target] > 0 and element in (E4M3, E5M2))
