"""The configurations of MXFP8 and MXFP4: `quantize_mx_`, `dequantize_mx_`."""

from __future__ import annotations

from ..mx import kernel as mx
from ..mx import tiles as mx_tiles
from .case import Case, Configuration, element_bytes
from .count import program_cost

BLOCK_NUMEL = 32
TILE_NUMEL = mx_tiles.TILE_BLOCKS * BLOCK_NUMEL
# (element, stochastic, swizzled). While an H100 moves its bytes there is time for 30 instructions
# an element of MXFP8 and 25 of MXFP4; swizzled tiles cost one division more.
QUANTIZE = (
    ("e4m3", False, False),
    ("e5m2", False, False),
    ("e2m1", False, False),
    ("e2m1", True, False),
    ("e4m3", True, False),
    ("e4m3", False, True),
    ("e2m1", False, True),
    ("e2m1", True, True),
)
DEQUANTIZE = (("e4m3", False), ("e2m1", False), ("e4m3", True), ("e2m1", True))
PATHS = {"full": (True, False), "masked": (False, True), "both": (True, True)}
OTHER = "bf16"  # what is quantized, and made of codes


def quantize_configuration(
    element: str,
    stochastic: bool,
    swizzled: bool,
    *,
    paths: str = "both",
    source: str = "*bf16",
) -> Configuration:
    """To codes and scales by the rule rceil."""
    full, masked = PATHS[paths]
    return Configuration(
        mx._quantize_kernel,
        {
            "source": source,
            "data": "*u8",
            "scales": "*u8",
            "rows": "i32",
            "row_numel": "i32",
            "width": "i32",
            "first_index": "i64",
            **({"seed": "i64"} if stochastic else {}),
        },
        {
            **({} if stochastic else {"seed": None}),
            "ELEMENT": element,
            "RULE": "rceil",
            "SWIZZLED": swizzled,
            "FULL": full,
            "MASKED": masked,
            "BLOCKS": mx_tiles.TILE_BLOCKS,
        },
        mx_tiles.NUM_WARPS,
    )


def dequantize_configuration(
    element: str, swizzled: bool, *, paths: str = "both", out: str = "*bf16"
) -> Configuration:
    """From codes and scales."""
    full, masked = PATHS[paths]
    return Configuration(
        mx._dequantize_kernel,
        {
            "out": out,
            "data": "*u8",
            "scales": "*u8",
            "rows": "i32",
            "row_numel": "i32",
            "width": "i32",
        },
        {
            "ELEMENT": element,
            "SWIZZLED": swizzled,
            "FULL": full,
            "MASKED": masked,
            "BLOCKS": mx_tiles.TILE_BLOCKS,
        },
        mx_tiles.NUM_WARPS,
    )


def _case(op: str, name: str, configuration: Configuration) -> Case:
    code_bytes = element_bytes(configuration.constexprs["ELEMENT"]) + 1 / BLOCK_NUMEL
    moved = element_bytes(OTHER) + code_bytes
    return Case(op, name, configuration, TILE_NUMEL, moved, program_cost)


def cases() -> tuple[Case, ...]:
    """All that have a gate."""
    there = (
        _case(
            "quantize_mx_",
            element + " stochastic" * stochastic + " swizzled" * swizzled,
            quantize_configuration(element, stochastic, swizzled, paths="full"),
        )
        for element, stochastic, swizzled in QUANTIZE
    )
    back = (
        _case(
            "dequantize_mx_",
            element + " swizzled" * swizzled,
            dequantize_configuration(element, swizzled, paths="full"),
        )
        for element, swizzled in DEQUANTIZE
    )
    return (*there, *back)
