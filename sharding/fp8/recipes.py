"""Which blocks of a matrix product's operands share a scale, and what a scale is: recipes, as data.

| recipe     | weights        | activations | gradients | scale of a block    | multiples of |
|------------|----------------|-------------|-----------|---------------------|--------------|
| delayed    | e4m3, tensor   | as weights  | e5m2 (*)  | FP32, from history  | 16           |
| tensorwise | e4m3, tensor   | as weights  | e5m2 (*)  | FP32                | 16           |
| blockwise  | e4m3, 128x128  | e4m3, 1x128 | e4m3      | FP32, power of two  | 128          |
| mxfp8      | e4m3, 1x32     | as weights  | e4m3      | E8M0 ("rceil")      | 32           |
| nvfp4      | e2m1, 1x16     | as weights  | e2m1      | E4M3, FP32 for all  | 128          |

(*) or e4m3. The last column is `align_numel`: what the sizes of a product are multiples of on a
GPU. Nothing here computes: formats and their scales are rows of `kernels.formats.table`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...kernels import FP8_1X128, FP8_ROW, MXFP8, NVFP4, BlockFormat
from ...kernels.checks import check_choice, check_flag, check_integer
from ...kernels.formats.table import ScaleRule, rule_of
from ...kernels.fp8.op import ALGORITHMS, MAX_HISTORY, MAX_MARGIN
from ...kernels.fp8.reference import ELEMENTS
from ..arguments import kind_of


@dataclass(frozen=True, slots=True)
class Blocks:
    """What shares a scale: `height` rows by `width` elements of a row; `None`: the whole tensor.

    The last block of a row, or of a column, may be short. `form`: the elements, and the codec that
    makes the scales. `rule`: what that is told of them.
    """

    form: BlockFormat
    height: int
    width: int | None
    rule: ScaleRule | bool | None

    @property
    def is_symmetric(self) -> bool:
        """Whether the blocks of a transposed matrix are its blocks, transposed."""
        return self.width is None or self.width == self.height


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """How delayed scaling makes a scale: from the "max" of `length` steps or the "most_recent",
    `margin` powers of two, 0 to 100, below the largest value. Defaults are TransformerEngine's.

    Raises:
        TypeError, ValueError: a value that `kernels.update_fp8_scales_` does not take.
    """

    length: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        check_integer("history_length", self.length, 1, MAX_HISTORY)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_integer("margin", self.margin, 0, MAX_MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How linear layers are quantised: `recipe_for` has those with a name. Of a stack of layers the
    first and the last few may stay in BF16. A history is of operands that are one block each.

    Raises:
        TypeError, ValueError: blocks, a history or numbers that are no such, or do not fit.
    """

    name: str
    weight: Blocks
    activation: Blocks
    gradient: Blocks
    align_numel: int
    history: History | None = None
    layers_at_start_in_bf16: int = 0
    layers_at_end_in_bf16: int = 0

    def __post_init__(self) -> None:
        for role in ("weight", "activation", "gradient"):
            blocks = getattr(self, role)
            if not isinstance(blocks, Blocks):
                raise TypeError(
                    f"{role}: expected Blocks, got {kind_of(blocks)}; take those of a recipe of "
                    "recipe_for"
                )
            if self.history is not None and blocks.width is not None:
                raise ValueError(
                    f"history: expected none beside {role}s in blocks of {blocks.height} x "
                    f"{blocks.width}, whose scales come from what they hold; leave it out, or take "
                    "the blocks of recipe_for('delayed')"
                )
        if self.history is not None and self.weight.form.element != self.activation.form.element:
            raise ValueError(
                f"history: expected one element of weights and activations, which share a state, "
                f"got {self.weight.form.element.name} and {self.activation.form.element.name}; "
                "take the same blocks for both"
            )
        if not isinstance(self.history, History | None):
            raise TypeError(
                f"history: expected a History or None, got {kind_of(self.history)}; pass History()"
            )
        check_integer("align_numel", self.align_numel, 1)
        check_integer("layers_at_start_in_bf16", self.layers_at_start_in_bf16, 0)
        check_integer("layers_at_end_in_bf16", self.layers_at_end_in_bf16, 0)

    def quantizes_layer(self, layer: int, num_layers: int) -> bool:
        """Whether layer number `layer`, from 0, of so many is quantised; `ValueError` if there is
        no such layer.
        """
        check_integer("num_layers", num_layers, 1)
        check_integer("layer", layer, 0, num_layers - 1)
        return self.layers_at_start_in_bf16 <= layer < num_layers - self.layers_at_end_in_bf16


def require_recipe(recipe: object) -> Recipe:
    """`recipe`, if it is one.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe: expected a Recipe, got {kind_of(recipe)}; make one with recipe_for(name)"
        )
    return recipe


def _one_block(element: str, power_of_2: bool) -> Blocks:
    check_choice("gradient_element", element, ELEMENTS)
    form = replace(FP8_ROW, name=f"fp8_tensor_{element}", element=ELEMENTS[element])
    return Blocks(form, 1, None, check_flag("power_of_2", power_of_2))


def _parts_of_rows(form: BlockFormat, power_of_2: bool = False) -> Blocks:
    return Blocks(form, 1, form.block_numel, rule_of(form, "rceil", power_of_2))


def _tensorwise(gradient_element: str = "e5m2", power_of_2: bool = False) -> dict[str, Any]:
    weight = _one_block("e4m3", power_of_2)
    gradient = _one_block(gradient_element, power_of_2)
    return {"weight": weight, "activation": weight, "gradient": gradient, "align_numel": 16}


def _delayed(
    history_length: int = 1024,
    algorithm: str = "max",
    margin: int = 0,
    gradient_element: str = "e5m2",
) -> dict[str, Any]:
    history = History(length=history_length, algorithm=algorithm, margin=margin)
    return {**_tensorwise(gradient_element), "history": history}


def _blockwise(power_of_2: bool = True) -> dict[str, Any]:
    # Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.
    parts = _parts_of_rows(FP8_1X128, check_flag("power_of_2", power_of_2))
    tiles = replace(parts, height=128)
    return {"weight": tiles, "activation": parts, "gradient": parts, "align_numel": 128}


def _mxfp8() -> dict[str, Any]:
    parts = _parts_of_rows(MXFP8)
    return {"weight": parts, "activation": parts, "gradient": parts, "align_numel": 32}


def _nvfp4() -> dict[str, Any]:
    parts = _parts_of_rows(NVFP4)
    return {"weight": parts, "activation": parts, "gradient": parts, "align_numel": 128}


RECIPES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "delayed": _delayed,
    "tensorwise": _tensorwise,
    "blockwise": _blockwise,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def recipe_for(
    name: str,
    *,
    layers_at_start_in_bf16: int = 0,
    layers_at_end_in_bf16: int = 0,
    **options: Any,
) -> Recipe:
    """The recipe with that name. Options, and what they are by default:

        delayed      history_length=1024, algorithm="max", margin=0, gradient_element="e5m2"
        tensorwise   gradient_element="e5m2", power_of_2=False: scales rounded down to such powers
        blockwise    power_of_2=True

    Raises:
        TypeError: an option that it has not, or of another type.
        ValueError: an unknown name, or an option out of its range.
    """
    check_choice("name", name, RECIPES)
    known = inspect.signature(RECIPES[name]).parameters
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"recipe_for: expected options of {name!r}, which are {', '.join(known) or 'none'}, "
            f"got {', '.join(unknown)}; leave out what it has not"
        )
    return Recipe(
        name=name,
        **RECIPES[name](**options),
        layers_at_start_in_bf16=layers_at_start_in_bf16,
        layers_at_end_in_bf16=layers_at_end_in_bf16,
    )
