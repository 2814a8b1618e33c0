"""FP8 and FP4: recipes, quantised tensors and shards of parameters, delayed scaling, a layer."""

from .delayed_scaling import DelayedScaling, update_scales
from .linear import Float8Linear
from .param_shards import quantize_param_shard
from .quantized import (
    QuantizedTensor,
    is_float8_tensor,
    is_mxfp8_tensor,
    is_nvfp4_tensor,
    quantize,
)
from .recipes import Blocks, History, Recipe, recipe_for

__all__ = [
    "Blocks",
    "DelayedScaling",
    "Float8Linear",
    "History",
    "QuantizedTensor",
    "Recipe",
    "is_float8_tensor",
    "is_mxfp8_tensor",
    "is_nvfp4_tensor",
    "quantize",
    "quantize_param_shard",
    "recipe_for",
    "update_scales",
]
