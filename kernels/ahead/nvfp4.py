"""The configurations of NVFP4 and of the Hadamard transform."""

from __future__ import annotations

from typing import Any

from ..nvfp4 import hadamard
from ..nvfp4 import kernel as nvfp4
from .case import Case, Configuration, element_bytes

# What a gate of the registry changes. An H100 has time for 25 instructions an element while it
# moves the bytes of a cast of BF16, and for 20 in a pass over the amax.
CHANGES: dict[str, dict[str, Any]] = {
    "nearest": {},
    "nearest fp32": {"source": "*fp32"},
    "stochastic": {"noise": True},
    "torchao": {"TORCHAO": True},
    "swizzled": {"SWIZZLED": True},
    "hadamard": {"HADAMARD": True},
    "hadamard stochastic": {"HADAMARD": True, "noise": True},
    "hadamard stochastic swizzled": {"HADAMARD": True, "noise": True, "SWIZZLED": True},
}
# (dtype, transformed); (dtype, whether torchao's variant, swizzled); (dtype, inverse).
AMAX = (("*bf16", False), ("*fp32", False), ("*fp32", True))
DEQUANTIZE = (("*bf16", False, False), ("*fp32", True, False), ("*bf16", False, True))
HADAMARD = (("*bf16", False), ("*fp32", True))
COUNTS = dict.fromkeys(("num_blocks", "row_blocks", "row_numel"), "i64")
ROWS_OF_SCALES = {"scale_columns": "i32", "reciprocal": "i64"}
CODE_BYTES = element_bytes("e2m1") + element_bytes("e4m3") / 16


def _quantize_options(changed: dict[str, Any]) -> dict[str, Any]:
    options = dict.fromkeys(("HADAMARD", "TORCHAO", "SWIZZLED"), False)
    return options | {"TILE": nvfp4.TILE_NUMEL} | changed


def quantize_configuration(
    source: str = "*bf16", *, noise: bool = False, **changed: Any
) -> Configuration:
    """All paths; noise: rounded stochastically."""
    pointers = {"source": source, "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    seed = {} if noise else {"seed": None}
    return Configuration(
        nvfp4._quantize_kernel,
        pointers
        | COUNTS
        | ROWS_OF_SCALES
        | {"first_index": "i64"}
        | ({} if seed else {"seed": "i64"}),
        _quantize_options(changed) | {"FLAT": True} | seed,
        nvfp4.NUM_WARPS,
    )


def _amax_options(transformed: bool) -> dict[str, Any]:
    tile = nvfp4.TILE_NUMEL if transformed else nvfp4.AMAX_TILE_NUMEL
    return {"HADAMARD": transformed, "TILE": tile}


def amax_configuration(source: str, transformed: bool) -> Configuration:
    """All paths."""
    return Configuration(
        nvfp4._amax_kernel,
        {"source": source, "amax": "*i32"} | COUNTS,
        _amax_options(transformed) | {"FLAT": True},
        nvfp4.NUM_WARPS,
    )


def dequantize_configuration(destination: str, torchao: bool, swizzled: bool) -> Configuration:
    """All paths."""
    pointers = {"destination": destination, "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return Configuration(
        nvfp4._dequantize_kernel,
        pointers | COUNTS | ROWS_OF_SCALES,
        {"TORCHAO": torchao, "SWIZZLED": swizzled, "TILE": nvfp4.TILE_NUMEL} | {"FLAT": True},
        nvfp4.NUM_WARPS,
    )


def hadamard_configuration(dtype: str, inverse: bool) -> Configuration:
    """All paths."""
    return Configuration(
        hadamard._hadamard_kernel,
        {"source": dtype, "destination": dtype, "num_blocks": "i64"}
        | {"row_blocks": "i32", "row_numel": "i32"},
        {"INVERSE": inverse, "FLAT": True, "TILE": hadamard.TILE_NUMEL},
        hadamard.NUM_WARPS,
    )


def _case(op: str, name: str, configuration: Configuration, moved_bytes: float) -> Case:
    tile = configuration.constexprs["TILE"]
    return Case(op, name, configuration, tile, moved_bytes, None)


def cases() -> tuple[Case, ...]:
    """All that have a gate."""
    quantize = (
        _case(
            "quantize_nvfp4_",
            name,
            quantize_configuration(**changed),
            element_bytes(changed.get("source", "bf16")) + CODE_BYTES,
        )
        for name, changed in CHANGES.items()
    )
    amax = (
        _case(
            "amax_nvfp4_",
            source[1:] + " hadamard" * transformed,
            amax_configuration(source, transformed),
            element_bytes(source),
        )
        for source, transformed in AMAX
    )
    back = (
        _case(
            "dequantize_nvfp4_",
            f"{'torchao' if torchao else 'te'} {destination[1:]}" + " swizzled" * swizzled,
            dequantize_configuration(destination, torchao, swizzled),
            CODE_BYTES + element_bytes(destination),
        )
        for destination, torchao, swizzled in DEQUANTIZE
    )
    transform = (
        _case(
            "hadamard16_",
            f"{'inverse' if inverse else 'forward'} {dtype[1:]}",
            hadamard_configuration(dtype, inverse),
            2 * element_bytes(dtype),
        )
        for dtype, inverse in HADAMARD
    )
    return (*quantize, *amax, *back, *transform)
