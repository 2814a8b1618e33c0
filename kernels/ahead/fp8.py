"""The configurations of FP8 with scales: `quantize_fp8_`, `dequantize_fp8_`, `update_fp8_scales_`.

Where two passes are needed, both have a case; what they move together is what the op does.
"""

from __future__ import annotations

from ..formats.device_table import element_of
from ..formats.table import ELEMENTS
from ..fp8 import kernel as fp8_kernels
from ..fp8 import two_pass as fp8_two_pass
from .case import Case, Configuration, element_bytes
from .count import path_cost

POINTERS = {"codes": "*u8", "scale_inv": "*fp32"}
# LINE, COUNT, CONTIGUOUS, warps.
LINES = {
    "1x128": (128, 32, True, 4),
    "1x128 of rows": (128, 32, False, 4),
    "short rows": (512, 8, False, 4),
    "rows": (4096, 1, False, 4),
    "long rows": (16384, 1, False, 16),
}
# Scaling, LINE, CONTIGUOUS.
DEQUANTIZE = (
    ("tensor", 4096, True),
    ("row", 512, False),
    ("1x128", 128, True),
    ("128x128", 128, False),
)
SQUARE = 128
SCALE_BYTES = 4
HISTORY = 1024
OTHER = "bf16"  # what is quantized, and made of codes


def lines_configuration(case: str, element: str = "e4m3", source: str = "*bf16") -> Configuration:
    """One scale for a line: 128 elements, or a row."""
    line, count, contiguous, num_warps = LINES[case]
    return Configuration(
        fp8_kernels._lines_kernel,
        POINTERS | {"x": source, "rows": "i32", "columns": "i32", "lines": "i32"},
        {
            "ELEMENT": element_of(ELEMENTS[element]),
            "POWER_OF_2": False,
            "LINE": line,
            "COUNT": count,
            "SINGLE": "rows" in case and not case.startswith("1x128"),
            "CONTIGUOUS": contiguous,
            "WIDE": True,
        },
        num_warps,
    )


def square_configuration(element: str = "e4m3", source: str = "*bf16") -> Configuration:
    """One scale for a square of 128 x 128."""
    return Configuration(
        fp8_kernels._square_kernel,
        POINTERS | {"x": source, "rows": "i32", "columns": "i32"},
        {"ELEMENT": element_of(ELEMENTS[element]), "POWER_OF_2": True, "WIDE": True},
        fp8_kernels.SQUARE_WARPS,
    )


def amax_configuration(source: str = "*bf16") -> Configuration:
    """The first pass: the amax of a tensor, or of rows too long for one program."""
    return Configuration(
        fp8_two_pass._amax_kernel,
        {"amax": "*i32", "x": source, "columns": "i32", "parts": "i32"},
        {"ALIGNED": True, "WIDE": False, "BLOCK": fp8_two_pass.BLOCK},
        fp8_two_pass.NUM_WARPS,
    )


def known_configuration(
    delayed: bool, element: str = "e4m3", source: str = "*bf16"
) -> Configuration:
    """The second pass; `delayed`: by a scale of the past, while the amax is taken."""
    signature = POINTERS | {"x": source, "amax": "*i32", "columns": "i32", "parts": "i32"}
    return Configuration(
        fp8_two_pass._known_kernel,
        signature | ({"scale": "*fp32"} if delayed else {}),
        ({} if delayed else {"scale": None})
        | {
            "ELEMENT": element_of(ELEMENTS[element]),
            "POWER_OF_2": False,
            "ALIGNED": True,
            "WIDE": False,
            "BLOCK": fp8_two_pass.BLOCK,
        },
        fp8_two_pass.NUM_WARPS,
    )


def dequantize_configuration(
    scaling: str, line: int, contiguous: bool, out: str = "*bf16"
) -> Configuration:
    """E4M3 back to `out`."""
    counts = ("rows", "columns", "lines", "matrix_rows")
    return Configuration(
        fp8_kernels._dequantize_kernel,
        POINTERS | {"out": out} | dict.fromkeys(counts, "i32"),
        {
            "SCALING": scaling,
            "MATRICES": False,
            "ELEMENT": element_of(ELEMENTS["e4m3"]),
            "LINE": line,
            "COUNT": fp8_two_pass.BLOCK // line,
            "SINGLE": scaling == "row",
            "CONTIGUOUS": contiguous,
            "WIDE": True,
        },
        fp8_two_pass.NUM_WARPS,
    )


def update_configuration() -> Configuration:
    """New scales from a history of amaxes, one program a scale."""
    return Configuration(
        fp8_two_pass._update_kernel,
        {"history": "*fp32", "scales": "*fp32", "target": "fp32", "length": "i32"},
        {"MOST_RECENT": False, "BLOCK": HISTORY},
        fp8_two_pass.NUM_WARPS,
    )


def _scale_bytes(scaling: str, line: int) -> float:
    """Bytes of scales an element."""
    if scaling == "tensor":
        return 0.0
    return SCALE_BYTES / (SQUARE * SQUARE if scaling == "128x128" else line)


def _quantize(
    name: str, configuration: Configuration, numel: int, extra_bytes: float, *functions: object
) -> Case:
    moved = element_bytes(OTHER) + element_bytes("e4m3") + extra_bytes
    return Case("quantize_fp8_", name, configuration, numel, moved, path_cost, functions)


def cases() -> tuple[Case, ...]:
    """All that have a gate, and the passes that have none."""
    lines = (
        _quantize(
            name, lines_configuration(name), line * count, SCALE_BYTES / line,
            fp8_kernels._lines_kernel,
        )
        for name, (line, count, _, _) in LINES.items()
    )  # fmt: skip
    back = (
        Case(
            "dequantize_fp8_",
            scaling,
            dequantize_configuration(scaling, line, contiguous),
            fp8_two_pass.BLOCK,
            element_bytes("e4m3") + element_bytes(OTHER) + _scale_bytes(scaling, line),
            path_cost,
        )
        for scaling, line, contiguous in DEQUANTIZE
    )
    block = fp8_two_pass.BLOCK
    return (
        *lines,
        _quantize("128x128", square_configuration(), SQUARE * SQUARE, _scale_bytes("128x128", 0)),
        _quantize("known scale", known_configuration(False), block, 0.0),
        _quantize("delayed", known_configuration(True), block, 0.0),
        Case("quantize_fp8_", "amax", amax_configuration(), block, element_bytes(OTHER), None),
        *back,
        Case("update_fp8_scales_", "max", update_configuration(), HISTORY, 2 * SCALE_BYTES, None),
    )
