"""The configurations of the plain casts: `cast_`, `cast_back_`."""

from __future__ import annotations

from ..cast import kernel as cast_kernels
from ..cast import op as cast_ops
from .case import Case, Configuration, element_bytes
from .count import path_cost

# (format, stochastic).
MODES = (
    *((to, False) for to in cast_ops.DTYPES),
    *((to, True) for to in cast_ops.STOCHASTIC),
)
POINTERS = {"bf16": "*bf16", "fp16": "*fp16"}
OTHER = "bf16"  # on the other side


def cast_configuration(to: str, stochastic: bool, source: str = "*bf16") -> Configuration:
    """Aligned memory, rows of whole bytes."""
    return Configuration(
        cast_kernels._cast_kernel,
        {
            "out": POINTERS.get(to, "*u8"),
            "x": source,
            "numel": "i32",
            "columns": "i32",
            "first_index": "i64",
            **({"seed": "i64"} if stochastic else {}),
        },
        {
            **({} if stochastic else {"seed": None}),
            "TO": to,
            "GROUPED": True,
            "ODD_ROWS": False,
            "ALIGNED": True,
            "BLOCK": cast_kernels.block_numel(to),
        },
        cast_kernels.NUM_WARPS,
    )


def cast_back_configuration(from_: str, out: str = "*bf16") -> Configuration:
    """Aligned memory."""
    return Configuration(
        cast_kernels._cast_back_kernel,
        {"out": out, "codes": POINTERS.get(from_, "*u8"), "numel": "i32"},
        {"FROM": from_, "ALIGNED": True, "BLOCK": cast_kernels.block_numel(from_)},
        cast_kernels.NUM_WARPS,
    )


def cases() -> tuple[Case, ...]:
    """All that have a gate, between BF16 and the format."""
    there = (
        Case(
            "cast_",
            to + " stochastic" * stochastic,
            cast_configuration(to, stochastic),
            cast_kernels.block_numel(to),
            element_bytes(OTHER) + element_bytes(to),
            path_cost,
            (cast_kernels._cast_full_block,),
        )
        for to, stochastic in MODES
    )
    back = (
        Case(
            "cast_back_",
            from_,
            cast_back_configuration(from_),
            cast_kernels.block_numel(from_),
            element_bytes(OTHER) + element_bytes(from_),
            path_cost,
            (cast_kernels._cast_back_full_block,),
        )
        for from_ in cast_ops.DTYPES
    )
    return (*there, *back)
