"""`quantize_param_shard`: what a rank has of the main parameters, into its part of quantised ones.

    amaxes     of each parameter's blocks, of what this rank has of them
    maximum    over the ranks, in one collective for all parameters: of blocks that may lie on
               several ranks, and of tensors that have one scale; without it if there are none
    codes      of this rank's elements; scales

| blocks                                            | compared           | scales written      |
|---------------------------------------------------|--------------------|---------------------|
| the tensor is one                                 | 1 number           | the one             |
| parts of rows, which no cut and no row's end cuts | none; 1 of NVFP4   | this rank's         |
| other parts of rows, tiles                        | 1 number each      | all                 |

What is not written here another rank writes: codes, and scales of the second kind, are gathered
afterwards as they lie, as bytes. Main parameters are rounded once, from what they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels import ALIGN_NUMEL
from ...kernels.arguments import check_source
from ...kernels.checks import check_device, check_integer, check_one_a_tensor, check_vector
from ..arguments import kind_of, require_member
from .delayed_scaling import DelayedScaling, max_over_ranks
from .quantized import (
    QuantizedTensor,
    block_amaxes,
    columns_of,
    fill_stretch,
    is_transformer_engine_tensor,
    tensor_amax,
)
from .recipes import Blocks

_TE_UTILS = "transformer_engine.pytorch.tensor.utils"
_TE_FUNCTIONS = ("quantize_master_weights", "cast_master_weights_to_fp8")  # the newer one first


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What this rank has of a parameter. `straddles`: some rank may have a part of a block."""

    target: QuantizedTensor
    elements: Tensor
    start: int
    straddles: bool


def quantize_param_shard(
    model_params: Sequence[Any],
    main_params: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | None,
    *,
    scaling: DelayedScaling | None = None,
    align_numel: int = ALIGN_NUMEL,
) -> None:
    """Write this rank's elements of every parameter, quantised, so that all ranks together have the
    bits of `quantize` of the whole parameters on one.

    Args:
        model_params: each a `QuantizedTensor`, the same on all ranks, or a tensor of
            TransformerEngine's, which that package's own function fills.
        main_params: of each, this rank's elements: FP32, BF16 or FP16 [n], contiguous; None or
            empty where it has none.
        start_offsets: where they begin in the parameter, in row-major order; anything if none.
        group: the ranks that have the parts between them; None: this one has all.
        scaling: of a delayed recipe, with a tensor for each of those `model_params` that are
            `QuantizedTensor`s, in their order. It notes their amaxes, those of all ranks;
            `update_scales` makes the next scales of them.
        align_numel: what the places are multiples of at which parameters are cut, on all ranks: 128
            in `buffers.FlatLayout`. Blocks that are no longer than that are not compared.

    Raises:
        TypeError, ValueError: arguments that do not fit each other, before anything is written or
            sent. Raised on one rank alone, the others wait for it.
        CommunicationError: the maximum failed.
        ImportError: a TransformerEngine that has no such function.
    """
    model_params = list(model_params)
    check_one_a_tensor("main_params", main_params, model_params)  # type: ignore[arg-type]
    check_one_a_tensor("start_offsets", start_offsets, model_params)  # type: ignore[arg-type]
    rows = list(zip(model_params, main_params, start_offsets, strict=True))
    theirs = [row for row in rows if is_transformer_engine_tensor(row[0])]
    ours = [
        _stretch(index, row, align_numel)
        for index, row in enumerate(rows)
        if not is_transformer_engine_tensor(row[0])
    ]
    if scaling is not None:
        _check_scaling(scaling, ours)
    if group is not None:
        require_member(group)
    if theirs:
        _transformer_engine_function()(*map(list, zip(*theirs, strict=True)), group)
    if ours:
        _quantize(ours, group, scaling)


def _stretch(
    index: int, row: tuple[object, Tensor | None, int | None], align_numel: int
) -> _Stretch:
    target, elements, start = row
    name = f"main_params[{index}]"
    if not isinstance(target, QuantizedTensor):
        raise TypeError(
            f"model_params: expected QuantizedTensors or TransformerEngine's, got "
            f"{type(target).__name__}; make one by QuantizedTensor.empty(shape, recipe.weight)"
        )
    straddles = may_straddle(target.shape, target.blocks, align_numel)
    if elements is None or not elements.numel():
        empty = torch.empty(0, device=target.codes.device)
        return _Stretch(target, empty, 0, straddles)
    check_source(name, elements)
    check_vector(name, elements)
    check_device(name, elements, target.codes.device)
    numel = target.shape.numel()
    start = check_integer(f"start_offsets[{index}]", start, 0, numel - elements.numel())
    for cut in (start, start + elements.numel()):
        if cut % align_numel and cut != numel:
            raise ValueError(
                f"{name}: expected elements that begin and end at multiples of align_numel "
                f"{align_numel}, or at the parameter's end {numel}, got {start} to "
                f"{start + elements.numel()}; pass the align_numel that all ranks' cuts have"
            )
    return _Stretch(target, elements.detach(), start, straddles)


def may_straddle(shape: torch.Size, blocks: Blocks, align_numel: int) -> bool:
    """Whether a cut of a tensor of `shape` at a multiple of `align_numel` may lie in a block.

    Raises:
        ValueError: it may lie in a byte.
    """
    a_byte = blocks.form.element.codes_per_byte
    check_integer("align_numel", align_numel, 1)
    if align_numel % a_byte:
        raise ValueError(
            f"align_numel: expected a multiple of {a_byte} for {blocks.form.name}, got "
            f"{align_numel}; cut parameters between bytes"
        )
    if blocks.width is None or blocks.height > 1:
        return True
    columns = columns_of(shape)
    ends = 0 if shape.numel() == columns else columns
    return bool(align_numel % blocks.width or ends % blocks.width)


def _check_scaling(scaling: object, stretches: Sequence[_Stretch]) -> None:
    if not isinstance(scaling, DelayedScaling):
        raise TypeError(
            f"scaling: expected a DelayedScaling, got {kind_of(scaling)}; pass the state of one"
        )
    kinds = [one.target.blocks for one in stretches]
    fitting = [
        one for one in kinds if one.width is None and one.form.element.name == scaling.element
    ]
    if not len(fitting) == len(stretches) == len(scaling.scales):
        raise ValueError(
            f"scaling: expected its {len(scaling.scales)} tensors, each one block of "
            f"{scaling.element}, got {len(stretches)} parameters, {len(fitting)} of them such; "
            "pass those by themselves"
        )


def _quantize(
    stretches: Sequence[_Stretch], group: dist.ProcessGroup | None, scaling: DelayedScaling | None
) -> None:
    own = [
        block_amaxes(one.elements, one.start, one.target.shape, one.target.blocks)
        for one in stretches
    ]
    compared = map(_compared, stretches, own)
    found = max_over_ranks(list(compared), group)
    scales: Sequence[Tensor | None] = [None] * len(stretches)
    if scaling is not None:
        scales = scaling.scales_for(torch.cat([one.view(-1) for one in found])).unbind()
    for one, mine, theirs, scale in zip(stretches, own, found, scales, strict=True):
        amaxes, largest = (theirs, None) if one.straddles else (mine, theirs)
        fill_stretch(one.target, one.elements, one.start, amaxes, scale=scale, largest=largest)


def _compared(one: _Stretch, amaxes: Tensor) -> Tensor:
    """What of a parameter's amaxes ranks have to know of each other, FP32 of any shape."""
    if one.straddles:
        return amaxes
    return tensor_amax(amaxes) if one.target.blocks.form.tensor_scale else amaxes.new_empty(0)


def _transformer_engine_function() -> Any:
    utils = importlib.import_module(_TE_UTILS)
    functions = [getattr(utils, name) for name in _TE_FUNCTIONS if hasattr(utils, name)]
    if not functions:
        raise ImportError(
            f"quantize_param_shard: expected {' or '.join(_TE_FUNCTIONS)} in {_TE_UTILS}, got "
            "neither; install TransformerEngine 2.2 or newer"
        )
    return functions[0]
