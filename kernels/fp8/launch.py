"""Owns how the kernels of FP8 scaling are launched: shapes to lines, blocks and warps.

A program has `BLOCK` elements, 32 a thread: two accesses of 16 bytes to the codes. Rows of up to
`MAX_LINE` elements stay in registers, by up to 16 warps, and are read once; longer ones, and whole
tensors, are read twice, by as many programs as they have blocks. The kernels are in
`kernel` and `two_pass`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from ..launch import LaunchConfig, is_aligned, launch
from ..tuned import MAX_WARPS, config_for
from . import kernel as fp8_kernels
from . import two_pass as fp8_two_pass
from .reference import BY_DTYPE, ELEMENTS, SQUARE

BLOCK = 4096
NUM_WARPS = 4
MAX_LINE = 16384
SQUARE_WARPS = 8
MIN_LINE = 16  # elements: one access of 16 bytes to the codes


@dataclass(frozen=True, slots=True)
class Lines:
    """How rows are cut into lines, and lines dealt to programs; see `kernel`."""

    rows: int
    columns: int
    line: int
    count: int
    contiguous: bool
    wide: bool
    config: LaunchConfig

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return triton.cdiv(self.columns, self.line)

    @property
    def programs(self) -> int:
        """Programs for all rows."""
        return triton.cdiv(self.rows * self.lines, self.count)

    @property
    def num_warps(self) -> int:
        """Warps of a program, so that each thread has as many elements."""
        return line_warps(self.line, self.config)


def line_warps(line: int, config: LaunchConfig) -> int:
    """Warps of a program that has lines of `line` elements."""
    return min(config.num_warps * max(1, line // config.block_bytes), MAX_WARPS)


@functools.cache
def default_config() -> LaunchConfig:
    """The block is of codes, a byte an element."""
    return LaunchConfig(BLOCK, NUM_WARPS)


@functools.cache
def squares_config() -> LaunchConfig:
    """For squares of 128 x 128, whose block is not looked at."""
    return LaunchConfig(BLOCK, SQUARE_WARPS)


def lines_of(
    shape: torch.Size, scaling: str, config: LaunchConfig, *, aligned: bool, max_line: int
) -> Lines:
    """The lines of a tensor that has elements; aligned: it, and what it becomes, by 16 bytes."""
    if scaling == "tensor":
        rows, columns = 1, shape.numel()
    else:
        rows, columns = shape[:-1].numel(), shape[-1]
    line = SQUARE
    if scaling in ("tensor", "row"):
        line = min(max(triton.next_power_of_2(columns), MIN_LINE), max_line)
    return Lines(
        rows=rows,
        columns=columns,
        line=line,
        count=max(1, config.block_bytes // line),
        contiguous=aligned and (rows == 1 or columns % line == 0),
        wide=aligned and columns % MIN_LINE == 0,
        config=config,
    )


def quantize_fp8_(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    scaling: str,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """`reference.quantize_fp8_` in one launch, or in two where a block exceeds a program."""
    element = BY_DTYPE[codes.dtype].name
    codes = codes.view(torch.uint8)
    if scaling == "128x128":
        _quantize_squares(codes, scale_inv, x, element, power_of_2)
    elif scaling == "tensor" or (scaling == "row" and x.shape[-1] > MAX_LINE):
        _quantize_known(codes, scale_inv, x, element, power_of_2, scale, amax)
    else:
        _quantize_lines(codes, scale_inv, x, scaling, element, power_of_2)


def _quantize_lines(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    scaling: str,
    element: str,
    power_of_2: bool,
) -> None:
    config = config_for("quantize_fp8_", scaling, default_config(), x.device)
    plan = lines_of(x.shape, scaling, config, aligned=is_aligned(codes, x), max_line=MAX_LINE)
    launch(
        fp8_kernels._lines_kernel,
        plan.programs,
        codes,
        scale_inv,
        x,
        plan.rows,
        plan.columns,
        plan.lines,
        on=x,
        num_warps=plan.num_warps,
        ELEMENT=element,
        POWER_OF_2=power_of_2,
        LINE=plan.line,
        COUNT=plan.count,
        SINGLE=plan.lines == 1,
        CONTIGUOUS=plan.contiguous,
        WIDE=plan.wide,
    )


def _quantize_squares(
    codes: torch.Tensor, scale_inv: torch.Tensor, x: torch.Tensor, element: str, power_of_2: bool
) -> None:
    rows, columns = x.shape[-2:]
    config = config_for("quantize_fp8_", "128x128", squares_config(), x.device)
    launch(
        fp8_kernels._square_kernel,
        scale_inv.numel(),
        codes,
        scale_inv,
        x,
        rows,
        columns,
        on=x,
        num_warps=config.num_warps,
        ELEMENT=element,
        POWER_OF_2=power_of_2,
        WIDE=is_aligned(codes, x) and columns % MIN_LINE == 0,
    )


def _quantize_known(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    x: torch.Tensor,
    element: str,
    power_of_2: bool,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """Rows, or the tensor as one: amax first, unless the scale is given, then the codes."""
    columns = x.numel() // scale_inv.numel()
    case = "tensor" if scale is None else "delayed"
    config = config_for("quantize_fp8_", case, default_config(), x.device)
    block, num_warps = config.block_bytes, config.num_warps
    parts = triton.cdiv(columns, block)
    programs = scale_inv.numel() * parts
    wide = is_aligned(codes, x) and columns % MIN_LINE == 0
    aligned = wide or (is_aligned(codes, x) and scale_inv.numel() == 1)
    bits: torch.Tensor | None
    if scale is None:
        bits = torch.zeros(scale_inv.numel(), dtype=torch.int32, device=x.device)
        launch(
            fp8_two_pass._amax_kernel,
            programs,
            bits,
            x,
            columns,
            parts,
            on=x,
            num_warps=num_warps,
            ALIGNED=aligned,
            WIDE=wide,
            BLOCK=block,
        )
    else:
        bits = None if amax is None else amax.view(torch.int32)
    launch(
        fp8_two_pass._known_kernel,
        programs,
        codes,
        scale_inv,
        x,
        bits,
        scale,
        columns,
        parts,
        on=x,
        num_warps=num_warps,
        ELEMENT=element,
        POWER_OF_2=power_of_2,
        ALIGNED=aligned,
        WIDE=wide,
        BLOCK=block,
    )


def dequantize_fp8_(
    out: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor, scaling: str
) -> None:
    """`reference.dequantize_fp8_` in one launch."""
    config = config_for("dequantize_fp8_", scaling, default_config(), codes.device)
    plan = lines_of(
        codes.shape, scaling, config, aligned=is_aligned(codes, out), max_line=config.block_bytes
    )
    matrix_rows = codes.shape[-2] if scaling == "128x128" else plan.rows
    launch(
        fp8_kernels._dequantize_kernel,
        plan.programs,
        out,
        codes.view(torch.uint8),
        scale_inv,
        plan.rows,
        plan.columns,
        plan.lines,
        matrix_rows,
        on=codes,
        num_warps=plan.num_warps,
        SCALING=scaling,
        MATRICES=matrix_rows < plan.rows,
        ELEMENT=BY_DTYPE[codes.dtype].name,
        LINE=plan.line,
        COUNT=plan.count,
        SINGLE=plan.lines == 1,
        CONTIGUOUS=plan.contiguous,
        WIDE=plan.wide,
    )


def update_fp8_scales_(
    amax_history: torch.Tensor, scales: torch.Tensor, element: str, margin: int, algorithm: str
) -> None:
    """`reference.update_fp8_scales_` in one launch, a program a tensor."""
    length = amax_history.shape[1]
    launch(
        fp8_two_pass._update_kernel,
        scales.numel(),
        amax_history,
        scales,
        ELEMENTS[element].max_finite * 2.0 ** (-margin),
        length,
        on=scales,
        num_warps=NUM_WARPS,
        MOST_RECENT=algorithm == "most_recent",
        BLOCK=triton.next_power_of_2(length),
    )
