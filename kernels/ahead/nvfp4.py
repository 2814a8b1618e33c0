"""The configurations of NVFP4 and of the Hadamard transform; a probe is of full tiles alone."""

from __future__ import annotations

from typing import Any

from .. import hadamard, nvfp4, nvfp4_decode
from . import nvfp4_probes as probes
from .case import Case, Configuration, element_bytes
from .counting import program_cost

# What a gate of the registry changes. An H100 has time for 25 instructions an element while it
# moves the bytes of a cast of BF16, and for 20 in a pass over the amax.
CHANGES: dict[str, dict[str, Any]] = {
    "nearest": {},
    "nearest fp32": {"source": "*fp32"},
    "stochastic": {"STOCHASTIC": True},
    "torchao": {"TORCHAO": True},
    "swizzled": {"SWIZZLED": True},
    "hadamard": {"HADAMARD": True},
    "hadamard stochastic": {"HADAMARD": True, "STOCHASTIC": True},
    "hadamard stochastic swizzled": {"HADAMARD": True, "STOCHASTIC": True, "SWIZZLED": True},
}
# (dtype, transformed); (dtype, whether torchao's variant, swizzled); (dtype, inverse).
AMAX = (("*bf16", False), ("*fp32", False), ("*fp32", True))
DEQUANTIZE = (("*bf16", False, False), ("*fp32", True, False), ("*bf16", False, True))
HADAMARD = (("*bf16", False), ("*fp32", True))
COUNTS = dict.fromkeys(("num_blocks", "row_blocks", "row_numel"), "i64")
ROWS_OF_SCALES = {"scale_columns": "i32", "reciprocal": "i64"}
NOISE = {"seed": "i64", "first_index": "i64"}
CODE_BYTES = element_bytes("e2m1") + element_bytes("e4m3") / 16


def _quantize_options(changed: dict[str, Any]) -> dict[str, Any]:
    options = dict.fromkeys(("HADAMARD", "STOCHASTIC", "TORCHAO", "SWIZZLED"), False)
    return options | {"TILE": nvfp4.TILE_NUMEL} | changed


def quantize_probe(source: str = "*bf16", **changed: Any) -> Configuration:
    """Full tiles alone."""
    pointers = {"source": source, "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return Configuration(
        probes.quantize_probe,
        pointers | ROWS_OF_SCALES | NOISE,
        _quantize_options(changed),
        nvfp4.NUM_WARPS,
    )


def quantize_configuration(**changed: Any) -> Configuration:
    """All paths."""
    pointers = {"source": "*bf16", "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return Configuration(
        nvfp4._quantize_kernel,
        pointers | COUNTS | ROWS_OF_SCALES | NOISE,
        _quantize_options(changed) | {"FLAT": True},
        nvfp4.NUM_WARPS,
    )


def amax_probe(source: str, transformed: bool) -> Configuration:
    """Full tiles alone."""
    tile = nvfp4.TILE_NUMEL if transformed else nvfp4.AMAX_TILE_NUMEL
    return Configuration(
        probes.amax_probe,
        {"source": source, "amax": "*i32"},
        {"HADAMARD": transformed, "TILE": tile},
        nvfp4.NUM_WARPS,
    )


def amax_configuration() -> Configuration:
    """All paths, of transformed elements."""
    return Configuration(
        nvfp4._amax_kernel,
        {"source": "*bf16", "amax": "*i32"} | COUNTS,
        {"HADAMARD": True, "FLAT": True, "TILE": nvfp4.TILE_NUMEL},
        nvfp4.NUM_WARPS,
    )


def dequantize_probe(destination: str, torchao: bool, swizzled: bool) -> Configuration:
    """Full tiles alone."""
    pointers = {"destination": destination, "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return Configuration(
        probes.dequantize_probe,
        pointers | ROWS_OF_SCALES,
        {"TORCHAO": torchao, "SWIZZLED": swizzled, "TILE": nvfp4_decode.TILE_NUMEL},
        nvfp4_decode.NUM_WARPS,
    )


def dequantize_configuration() -> Configuration:
    """All paths, of swizzled scales."""
    pointers = {"destination": "*bf16", "data": "*u8", "scales": "*u8", "amax": "*fp32"}
    return Configuration(
        nvfp4_decode._dequantize_kernel,
        pointers | COUNTS | ROWS_OF_SCALES,
        {"TORCHAO": False, "SWIZZLED": True, "FLAT": True, "TILE": nvfp4_decode.TILE_NUMEL},
        nvfp4_decode.NUM_WARPS,
    )


def hadamard_probe(dtype: str, inverse: bool) -> Configuration:
    """Full blocks alone."""
    return Configuration(
        probes.hadamard_probe,
        {"source": dtype, "destination": dtype},
        {"INVERSE": inverse, "TILE": hadamard.BLOCK_NUMEL},
        hadamard.NUM_WARPS,
    )


def hadamard_configuration() -> Configuration:
    """All paths, of the inverse."""
    return Configuration(
        hadamard._hadamard_kernel,
        {"source": "*fp16", "destination": "*fp16", "num_groups": "i64"}
        | {"row_groups": "i32", "row_numel": "i32"},
        {"INVERSE": True, "FLAT": True, "BLOCK": hadamard.BLOCK_NUMEL},
        hadamard.NUM_WARPS,
    )


def _case(op: str, name: str, configuration: Configuration, moved_bytes: float) -> Case:
    tile = configuration.constexprs["TILE"]
    return Case(op, name, configuration, tile, moved_bytes, program_cost)


def cases() -> tuple[Case, ...]:
    """All that have a gate."""
    quantize = (
        _case(
            "quantize_nvfp4_",
            name,
            quantize_probe(**changed),
            element_bytes(changed.get("source", "bf16")) + CODE_BYTES,
        )
        for name, changed in CHANGES.items()
    )
    amax = (
        _case(
            "amax_nvfp4_",
            source[1:] + " hadamard" * transformed,
            amax_probe(source, transformed),
            element_bytes(source),
        )
        for source, transformed in AMAX
    )
    back = (
        _case(
            "dequantize_nvfp4_",
            f"{'torchao' if torchao else 'te'} {destination[1:]}" + " swizzled" * swizzled,
            dequantize_probe(destination, torchao, swizzled),
            CODE_BYTES + element_bytes(destination),
        )
        for destination, torchao, swizzled in DEQUANTIZE
    )
    transform = (
        _case(
            "hadamard16_",
            f"{'inverse' if inverse else 'forward'} {dtype[1:]}",
            hadamard_probe(dtype, inverse),
            2 * element_bytes(dtype),
        )
        for dtype, inverse in HADAMARD
    )
    return (*quantize, *amax, *back, *transform)
