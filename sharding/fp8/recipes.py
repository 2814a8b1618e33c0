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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...kernels import FP8_1X128, FP8_ROW, MXFP8, NVFP4, BlockFormat
from ...kernels.checks import check_choice, check_integer
from ...kernels.formats.table import ScaleRule, rule_of
from ...kernels.fp8.op import ALGORITHMS, MAX_HISTORY, MAX_MARGIN
from ...kernels.fp8.reference import ELEMENTS
from ..arguments import kind_of

ROLES = ("weight", "activation", "gradient")


@dataclass(frozen=True, slots=True)
class Blocks:
    """What shares a scale: `height` rows by `width` elements of a row; `None`: the whole tensor.

    The last block of a row, or of a column, may be short. `form`: the elements, and the codec that
    makes the scales. `rule`: what that is told of them; for FP8 whether they are powers of two.

    Raises:
        TypeError, ValueError: a height or width below 1, a rule of another kind than the format's.
    """

    form: BlockFormat
    height: int
    width: int | None
    rule: ScaleRule | bool | None

    def __post_init__(self) -> None:
        check_integer("height", self.height, 1)
        check_integer("width", 1 if self.width is None else self.width, 1)
        known = rule_of(self.form, "rceil", False)
        if type(self.rule) is not type(known):
            raise ValueError(
                f"rule: expected a {type(known).__name__} for {self.form.name}, got {self.rule!r}; "
                "take that of a recipe of recipe_for"
            )

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
        check_integer("length", self.length, 1, MAX_HISTORY)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        check_integer("margin", self.margin, 0, MAX_MARGIN)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How linear layers are quantised: `recipe_for` has those with a name. A history is of operands
    that are one block each.

    Raises:
        TypeError, ValueError: blocks, a history or a number that are no such, or do not fit.
    """

    name: str
    weight: Blocks
    activation: Blocks
    gradient: Blocks
    align_numel: int
    history: History | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.history, History | None):
            raise TypeError(
                f"history: expected a History or None, got {kind_of(self.history)}; pass History()"
            )
        for role in ROLES:
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
        check_integer("align_numel", self.align_numel, 1)


def _tensor(element: str) -> Blocks:
    form = replace(FP8_ROW, name=f"fp8_tensor_{element}", element=ELEMENTS[element])
    return Blocks(form, 1, None, False)


def _strips(form: BlockFormat, power_of_2: bool = False) -> Blocks:
    return Blocks(form, 1, form.block_numel, rule_of(form, "rceil", power_of_2))


_TENSOR, _WIDER, _MX, _NVFP4 = _tensor("e4m3"), _tensor("e5m2"), _strips(MXFP8), _strips(NVFP4)
# Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.
_STRIPS = _strips(FP8_1X128, power_of_2=True)
_TILES = replace(_STRIPS, height=128)
RECIPES: Mapping[str, Recipe] = {
    "delayed": Recipe("delayed", _TENSOR, _TENSOR, _WIDER, 16, History()),
    "tensorwise": Recipe("tensorwise", _TENSOR, _TENSOR, _WIDER, 16),
    "blockwise": Recipe("blockwise", _TILES, _STRIPS, _STRIPS, 128),
    "mxfp8": Recipe("mxfp8", _MX, _MX, _MX, 32),
    "nvfp4": Recipe("nvfp4", _NVFP4, _NVFP4, _NVFP4, 128),
}


def recipe_for(name: str, **changes: Any) -> Recipe:
    """The recipe with that name, other fields being changed:

        recipe_for("delayed", history=History(length=16, margin=1))
        recipe_for("tensorwise", gradient=recipe_for("tensorwise").weight)
        recipe_for("blockwise", weight=dataclasses.replace(tiles, rule=False))

    Raises:
        TypeError, ValueError: an unknown name, or as `Recipe` does.
    """
    check_choice("name", name, RECIPES)
    return replace(RECIPES[name], **changes)
