"""The configurations of the flat optimizers and of the norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..launch import ACCESS_BYTES, THREADS_PER_WARP
from ..optim import adamw as flat_adamw
from ..optim import norm
from ..optim import sgd as flat_sgd
from ..optim import tiles as flat_tiles
from . import compile as aot
from .case import Case, Configuration, element_bytes
from .count import CountError, stretches

SHARED = {
    "param": "*fp32", "lr": "*fp32", "step": "*i32", "factor": "*fp32", "found_inf": "*i32",
    "numel": "i32", "tiles_at": "i32", "decay_high": "fp32", "decay_low": "fp32",
}  # fmt: skip
ADAMW = {
    "exp_avg": "*fp32", "exp_avg_sq": "*fp32", "powers": "*fp64", "weight": "fp32", "beta2": "fp32",
    "growth": "fp32", "eps": "fp32",
}  # fmt: skip
SGD = {"momentum_buffer": "*fp32", "momentum": "fp32", "growth": "fp32"}
KERNELS: dict[str, tuple[Any, Any, dict[str, str], dict[str, Any]]] = {
    "adamw": (flat_adamw, flat_adamw._adamw_kernel, ADAMW, {"NEAR": True}),
    "sgd": (flat_sgd, flat_sgd._sgd_kernel, SGD, {"NESTEROV": True}),
}
# (dtype of the gradient, of the compute shard).
VARIANTS = (("*bf16", "*bf16"), ("*bf16", None), ("*fp32", "*bf16"), ("*bf16", "*u8"))
NAMES = {None: "none", "*u8": "e4m3"}
FP32_BYTES = 4
STATE_TENSORS = {"adamw": 3, "sgd": 2}  # the parameter among them, read and written
NORM_PATHS = 3  # of FP32, FP16 and BF16


def block_numel(grad: str, compute: str | None) -> int:
    """Elements of a program."""
    widths = [_bytes_of(grad), _bytes_of(compute)] if compute else [_bytes_of(grad), FP32_BYTES]
    return flat_tiles.block_numel(int(min(widths)))


def optimizer_configuration(
    name: str,
    grad: str,
    compute: str | None,
    *,
    segments: bool = True,
    types: Mapping[str, str] | None = None,
    **constexprs: Any,
) -> Configuration:
    """One step of "adamw" or "sgd"; with a table of segments, which only adds to the work."""
    _, kernel, own_signature, own_constexprs = KERNELS[name]
    optional = {"compute": compute}
    for argument, kind in (("compute_scale", "*fp32"), ("amax", "*i32")):
        optional[argument] = kind if compute == "*u8" else None
    for argument, kind in (("table", "*i64"), ("lr_scales", "*fp64"), ("weight_decays", "*fp32")):
        optional[argument] = kind if segments else None
    present = {argument: kind for argument, kind in optional.items() if kind is not None}
    absent = {argument: None for argument, kind in optional.items() if kind is None}
    return Configuration(
        kernel,
        {**SHARED, **own_signature, "grad": grad, **present, **(types or {})},
        {
            **own_constexprs,
            **absent,
            "MAXIMIZE": True,
            "ALIGNED": True,
            "BLOCK": block_numel(grad, compute),
            **constexprs,
        },
        flat_tiles.NUM_WARPS,
    )


def largest_configuration() -> Configuration:
    """The norm's first kernel: the largest magnitude of tensors of any dtypes."""
    return Configuration(
        norm._largest_kernel,
        {"table": "*i64", "tiles_at": "i32", "largest": "*i32"},
        {"TILE_BYTES": norm.TILE_BYTES},
        norm.NUM_WARPS,
    )


def squares_configuration() -> Configuration:
    """The norm's second kernel: the block sums of tensors of any dtypes."""
    return Configuration(
        norm._squares_kernel,
        {"table": "*i64", "tiles_at": "i32", "largest": "*i32", "limbs": "*i64"},
        {"TILE_BYTES": norm.TILE_BYTES},
        norm.NUM_WARPS,
    )


def _bytes_of(pointer: str) -> float:
    return 1.0 if pointer == "*u8" else element_bytes(pointer)


def step_cost(compiled: aot.CompiledKernel, elements_per_thread: float) -> float:
    """Instructions an element from the kernel's start to where the full tile's path exits."""
    wide, count = stretches(compiled, ("EXIT",))[0]
    if not wide:
        raise CountError("expected the path of full tiles to exit first, got another one")
    return count / elements_per_thread


def _norm_costs(compiled: aot.CompiledKernel) -> list[float]:
    """Instructions for each element that a thread would have of FP32, of each path, ascending."""
    full = [found for found in stretches(compiled, ("BRA", "EXIT")) if found[0]]
    loads = norm.TILE_BYTES // (norm.NUM_WARPS * THREADS_PER_WARP * ACCESS_BYTES)
    if [wide for wide, _ in full] != [loads] * NORM_PATHS:
        raise CountError(f"expected {NORM_PATHS} paths of {loads} wide loads, got {full}")
    return sorted(count * FP32_BYTES / (loads * ACCESS_BYTES) for _, count in full)


def fp32_norm_cost(compiled: aot.CompiledKernel, elements_per_thread: float) -> float:
    """Instructions an element of FP32, whose path is the shortest: the others have twice as many
    elements, and convert them.
    """
    del elements_per_thread  # the paths have different ones
    return _norm_costs(compiled)[0]


def half_norm_cost(compiled: aot.CompiledKernel, elements_per_thread: float) -> float:
    """Instructions an element of two bytes, on the costlier of their paths."""
    del elements_per_thread
    return _norm_costs(compiled)[-1] / 2


def _step_case(name: str, grad: str, compute: str | None, *, segments: bool) -> Case:
    case = f"{grad[1:]} -> {NAMES.get(compute) or str(compute)[1:]}"
    moved = 2 * FP32_BYTES * STATE_TENSORS[name] + _bytes_of(grad)
    return Case(
        f"flat_{name}_",
        case + " one segment" * (not segments),
        optimizer_configuration(name, grad, compute, segments=segments),
        block_numel(grad, compute),
        moved + (_bytes_of(compute) if compute else 0.0),
        step_cost,
        (KERNELS[name][0]._full_tile,),
    )


def cases() -> tuple[Case, ...]:
    """All that have a gate."""
    steps = [
        _step_case(name, *variant, segments=segments)
        for name in KERNELS
        for variant, segments in (*((variant, True) for variant in VARIANTS), (VARIANTS[0], False))
    ]
    norms = [
        Case(
            "l2_norm_",
            name,
            configuration,
            norm.TILE_BYTES // width,
            width,
            count,
            (function,),
        )
        for case, width, count in (("fp32", 4, fp32_norm_cost), ("half", 2, half_norm_cost))
        for name, configuration, function in (
            (case, squares_configuration(), norm._aligned_squares),
            (f"{case} largest", largest_configuration(), norm._full_largest),
        )
    ]
    return (*steps, *norms)
