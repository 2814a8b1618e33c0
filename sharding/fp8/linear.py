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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ...kernels import swizzle_scales
from ...kernels.checks import check_integer
from ..arguments import kind_of, require_module
from .delayed_scaling import DelayedScaling
from .quantized import QuantizedTensor, block_amaxes, codec_function, quantize
from .recipes import Blocks, Recipe, require_recipe


class Float8Linear(nn.Linear):
    """`nn.Linear` computed with quantised operands, as `recipe` says; `weight` and `bias` stay.

    in_features and out_features: multiples of the recipe's `align_numel`. A delayed recipe has its
    state in `operand_scaling` (of input and weight) and `gradient_scaling`: call `update_scales`
    once a step.

    What is multiplied is rounded, so a gradient has none of its own: a second backward raises.

    Raises:
        TypeError: no recipe, or features that are no integers.
        ValueError: features that are no such multiples.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_recipe(recipe)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if check_integer(name, value, 1) % recipe.align_numel:
                raise ValueError(
                    f"{name}: expected a multiple of {recipe.align_numel} for {recipe.name}, got "
                    f"{value}; leave this layer an nn.Linear"
                )
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = recipe
        self.operand_scaling = self.gradient_scaling = None
        if recipe.history is not None:
            self.operand_scaling, self.gradient_scaling = (
                DelayedScaling(
                    recipe.history, count, element=blocks.form.element.name, device=device
                )
                for blocks, count in ((recipe.weight, 2), (recipe.gradient, 1))
            )

    @classmethod
    def of(cls, linear: nn.Linear, recipe: Recipe) -> Float8Linear:
        """One with the parameters, hooks and other attributes of `linear`, the same objects.

        Raises:
            ValueError: features that are no such multiples, parameters that are sharded already.
        """
        if hasattr(linear.weight, "full_tensor"):
            raise ValueError(
                f"linear: expected plain parameters, got a {kind_of(linear.weight)}; quantise the "
                "layers of a model before it is sharded"
            )
        sizes = linear.in_features, linear.out_features
        new = cls(*sizes, bias=False, recipe=recipe, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        for state in new.children():
            assert isinstance(state, DelayedScaling)
            state.to_empty(device=linear.weight.device).reset_parameters()
        kept = ("_parameters", "_buffers", "_modules")
        vars(new).update({name: vars(linear)[name] for name in vars(linear) if name not in kept})
        return new.train(linear.training)

    def forward(self, input: Tensor, weight: QuantizedTensor | None = None) -> Tensor:
        """input [..., in_features] -> [..., out_features] of its dtype.

        weight: what `quantize_param_shard` made of `self.weight`, in the recipe's blocks; None:
        that is quantised here. Gradients are those of `self.weight`.

        Raises:
            ValueError: a quantised weight of another shape or recipe.
        """
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
        recipe, state = layer.recipe, layer.operand_scaling
        rows = _padded(x, recipe.align_numel)
        operand = _quantize(rows, recipe.activation, state, 0)
        made = _quantize(weight, recipe.weight, state, 1) if given is None else given
        ctx.layer, ctx.operands, ctx.was_given = layer, (operand, made), given is not None
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        out = product(operand, made, x.dtype)
        return out[: x.shape[:-1].numel()].view(*x.shape[:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        recipe, (operand, made) = ctx.layer.recipe, ctx.operands
        grad_rows = _padded(grad, recipe.align_numel)
        gradient = _quantize(grad_rows, recipe.gradient, ctx.layer.gradient_scaling, 0)
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


def quantize_linears(layers: Sequence[nn.Module], recipe: Recipe) -> list[str]:
    """Put a `Float8Linear` in the place of every `nn.Linear` inside each of `layers`, the blocks of
    a model in their order, but for those that the recipe leaves in BF16; parameters, hooks and what
    was set on it stay the same objects, and one of several places is one again. Returns the names
    of those replaced, "<layer>.<name>".

    Raises:
        TypeError: no recipe, no list of layers, a layer that is no module.
        ValueError: a layer whose sizes do not fit, that is an `nn.Linear` itself, or is sharded
            already; nothing is replaced then.
    """
    require_recipe(recipe)
    places: list[tuple[str, nn.Module, str, nn.Linear]] = []
    for index, layer in enumerate(_listed(layers)):
        if not recipe.quantizes_layer(index, len(layers)):
            continue
        for prefix, parent in layer.named_modules():
            for name, child in parent._modules.items():
                if type(child) is nn.Linear:
                    full = ".".join(part for part in (str(index), prefix, name) if part)
                    places.append((full, parent, name, child))
    made = {child: Float8Linear.of(child, recipe) for _, _, _, child in places}
    for _, parent, name, child in places:
        setattr(parent, name, made[child])
    return list(dict.fromkeys(full for full, _, _, _ in places))


def _listed(layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """`layers`, if they are modules with places inside them."""
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
        raise TypeError(
            f"layers: expected a list of modules, got {kind_of(layers)}; pass the model's blocks"
        )
    for index, layer in enumerate(layers):
        require_module(layer)
        if isinstance(layer, nn.Linear):
            raise ValueError(
                f"layers: expected blocks, inside which linear layers are replaced, got a "
                f"{kind_of(layer)} itself as number {index}; pass [the module that it lies in]"
            )
    return layers


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


def _quantize(
    x: Tensor, blocks: Blocks, state: DelayedScaling | None, index: int
) -> QuantizedTensor:
    """A matrix; with a state, by the scale of its tensor `index`, which is told the amax."""
    x = x.detach().contiguous()
    if state is None:
        return quantize(x, blocks)
    amaxes = block_amaxes(x.view(-1), 0, x.shape, blocks).view(1)
    return quantize(x, blocks, scale=state.scales_for(index, amaxes).view(()))


def _across(made: QuantizedTensor, whole: Tensor) -> QuantizedTensor:
    """The transposed operand: `made` of the matrix `whole`."""
    if made.blocks.is_symmetric:
        return made.transposed()
    return quantize(whole.detach().t().contiguous(), made.blocks)


def _padded(x: Tensor, align_numel: int) -> Tensor:
    """[..., columns] -> [tokens, columns], with rows of zeros up to a multiple."""
    rows = x.reshape(-1, x.shape[-1])
    return functional.pad(rows, (0, 0, 0, -len(rows) % align_numel))
