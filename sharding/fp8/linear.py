"""`Float8Linear`: a linear layer whose three matrix products take quantised operands.

Each product is a b^T of two matrices that are quantised along their rows, which is the order in
which tensor cores take them; T is the number of tokens:

| product  | a                    | b                     | contracted over |
|----------|----------------------|-----------------------|-----------------|
| output   | input [T, in]        | weight [out, in]      | in              |
| to input | gradient [T, out]    | weight^T [in, out]    | out             |
| to weight| gradient^T [out, T]  | input^T [in, T]       | T               |

Where blocks are square a transposed operand has the codes of the other one; else it is quantised
anew, along its own rows. Tokens are padded with zeros to a multiple of the recipe's `align_numel`.

The definition, and what a CPU computes, is the product of the dequantised operands in FP32, rounded
once. A GPU runs `torch._scaled_mm` where a tensor has one scale, and for MXFP8 and NVFP4: the same
but for the order of additions. Tiles take the definition there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...kernels import swizzle_scales
from ...kernels.checks import SOURCE_DTYPES, check_dtype
from ..arguments import kind_of
from .delayed_scaling import DelayedScaling
from .quantized import QuantizedTensor, block_amaxes, codec_function, quantize
from .recipes import ROLES, Recipe

_ITS_OWN = ("_parameters", "_buffers", "_modules")
# What would go on computing the plain product in its place: `linear.compile()` sets the latter.
_CALLS = ("forward", "_compiled_call_impl")


class Float8Linear(nn.Linear):
    """`linear` computed with quantised operands, as `recipe` says, to be put in its place: it has
    its parameters, hooks and other attributes, the same objects.

    in_features and out_features: multiples of the recipe's `align_numel`. A delayed recipe has its
    state in `scaling`, by role: call `update_scales` once a step.

    What is multiplied is rounded, so a gradient has none of its own: a second backward raises.

    Raises:
        TypeError: no linear layer, no recipe.
        ValueError: features that are no such multiples, parameters that are sharded already, parts
            beside weight and bias, as adapters and parametrizations have them, a forward of its
            own or a compiled one.
    """

    def __init__(self, linear: nn.Linear, recipe: Recipe) -> None:
        for name, value, kind in (("linear", linear, nn.Linear), ("recipe", recipe, Recipe)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"{name}: expected a {kind.__name__}, got {kind_of(value)}; pass one, of "
                    "recipes such as recipe_for(name)"
                )
        if hasattr(linear.weight, "full_tensor"):
            raise ValueError(
                f"linear: expected plain parameters, got a {kind_of(linear.weight)}; quantise the "
                "layers of a model before it is sharded"
            )
        parts = {name for kind in _ITS_OWN for name in vars(linear)[kind]} - {"scaling"}
        parts |= vars(linear).keys() & _CALLS
        if parts != {"weight", "bias"}:
            raise ValueError(
                f"linear: expected a weight and a bias alone, got {sorted(parts)}; leave this "
                "layer as it is, or take out what else it has"
            )
        sizes = linear.in_features, linear.out_features
        if any(size < 1 or size % recipe.align_numel for size in sizes):
            raise ValueError(
                f"linear: expected in_features and out_features that are multiples of "
                f"{recipe.align_numel} for {recipe.name}, got {sizes}; leave this layer as it is"
            )
        nn.Module.__init__(self)
        own = vars(self)
        own.update({name: value for name, value in vars(linear).items() if name not in _ITS_OWN})
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe
        self.scaling = nn.ModuleDict(
            {
                role: DelayedScaling(
                    recipe.history,
                    1,
                    element=getattr(recipe, role).form.element.name,
                    device=linear.weight.device,
                )
                for role in ROLES
                if recipe.history is not None
            }
        ).train(linear.training)

    def forward(self, input: Tensor, weight: QuantizedTensor | None = None) -> Tensor:
        """input [..., in_features] -> [..., out_features] of its dtype.

        weight: what `quantize_param_shard` made of `self.weight`, in the recipe's blocks; None:
        that is quantised here. Gradients are those of `self.weight`.

        Raises:
            ValueError: an input that is not FP32, BF16 or FP16, a quantised weight of another shape
                or recipe.
        """
        check_dtype("input", input, SOURCE_DTYPES)
        if weight is not None and (weight.shape, weight.blocks) != (
            self.weight.shape,
            self.recipe.weight,
        ):
            raise ValueError(
                f"weight: expected {tuple(self.weight.shape)} in the blocks of {self.recipe.name}, "
                f"got {tuple(weight.shape)} in {weight.blocks}; use QuantizedTensor.empty("
                "shape, recipe.weight)"
            )
        found: Tensor = _Linear.apply(input, self.weight, weight, self)
        return found if self.bias is None else found + self.bias.to(found.dtype)


class _Linear(torch.autograd.Function):
    """The three products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, given: QuantizedTensor | None, layer: Float8Linear
    ) -> Tensor:
        rows = _padded(x, layer.recipe.align_numel)
        operand = _quantize(rows, "activation", layer)
        made = _quantize(weight, "weight", layer) if given is None else given
        ctx.layer, ctx.operands, ctx.was_given = layer, (operand, made), given is not None
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        out = product(operand, made, x.dtype)
        return out[: x.shape[:-1].numel()].view(*x.shape[:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        operand, made = ctx.operands
        grad_rows = _padded(grad, ctx.layer.recipe.align_numel)
        gradient = _quantize(grad_rows, "gradient", ctx.layer)
        to_input = to_weight = None
        if ctx.needs_input_grad[0]:
            # What was only given quantised is all that there is of it.
            whole = made.dequantize() if ctx.was_given else weight
            to_input = product(gradient, _across(made, whole), grad.dtype)
            to_input = to_input[: ctx.shape[:-1].numel()].view(ctx.shape)
        if ctx.needs_input_grad[1]:
            across = _across(gradient, grad_rows), _across(operand, rows)
            to_weight = product(*across, weight.dtype)
        return to_input, to_weight, None, None


def product(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] b [N, K]^T -> [M, N] of `dtype`, both quantised along K."""
    multiply = SCALED_MM.get(_kind(a, b)) if a.codes.device.type == "cuda" else None
    if multiply is not None:
        return multiply(a, b, dtype)
    with torch.autocast(a.codes.device.type, enabled=False):
        return (a.dequantize() @ b.dequantize().t()).to(dtype)


def _kind(a: QuantizedTensor, b: QuantizedTensor) -> str:
    kinds = {"tensor" if one.blocks.width is None else one.blocks.form.name for one in (a, b)}
    return kinds.pop() if len(kinds) == 1 else ""


def _of_tensors(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    # The second operand is column-major [K, N], which is row-major [N, K] seen transposed.
    found: Tensor = torch._scaled_mm(
        a.codes, b.codes.t(), a.scales, b.scales, out_dtype=dtype, use_fast_accum=False
    )
    return found


def _of_mx(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    scales = swizzle_scales(a.scales), swizzle_scales(b.scales)
    found: Tensor = torch._scaled_mm(a.codes, b.codes.t(), *scales, out_dtype=torch.bfloat16)
    return found.to(dtype)


def _of_nvfp4(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    codes = a.codes.view(torch.float4_e2m1fn_x2), b.codes.view(torch.float4_e2m1fn_x2).t()
    scales = swizzle_scales(a.scales), swizzle_scales(b.scales)
    found: Tensor = torch._scaled_mm(*codes, *scales, out_dtype=torch.bfloat16)
    return (found * (tensor_factor(a) * tensor_factor(b))).to(dtype)


def tensor_factor(of: QuantizedTensor) -> Tensor:
    """FP32 []: what codes are multiplied by where the scale of a block is 1."""
    assert of.amax is not None
    one = torch.ones(1, 1, device=of.codes.device).to(of.scales.dtype).view(torch.uint8)
    factor: Tensor = codec_function(of.blocks, "factors_of")(one, of.amax.view(1, 1))
    return factor.view(())


Multiply = Callable[[QuantizedTensor, QuantizedTensor, torch.dtype], Tensor]
SCALED_MM: Mapping[str, Multiply] = {"tensor": _of_tensors, "mxfp8": _of_mx, "nvfp4": _of_nvfp4}


def _quantize(x: Tensor, role: str, layer: Float8Linear) -> QuantizedTensor:
    """A matrix; with a state, which is told its amax, by the scale of that."""
    x, blocks = x.detach().contiguous(), getattr(layer.recipe, role)
    if role not in layer.scaling:
        return quantize(x, blocks)
    amaxes = block_amaxes(x.view(-1), 0, x.shape, blocks).view(1)
    state = cast(DelayedScaling, layer.scaling[role])
    return quantize(x, blocks, scale=state.scales_for(amaxes).view(()))


def _across(made: QuantizedTensor, whole: Tensor) -> QuantizedTensor:
    """The transposed operand: `made` of the matrix `whole`."""
    if made.blocks.is_symmetric:
        return made.transposed()
    return quantize(whole.detach().t().contiguous(), made.blocks)


def _padded(x: Tensor, align_numel: int) -> Tensor:
    """[..., columns] -> [tokens, columns], with rows of zeros up to a multiple."""
    rows = x.reshape(-1, x.shape[-1])
    return functional.pad(rows, (0, 0, 0, -len(rows) % align_numel))
