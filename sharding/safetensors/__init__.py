"""Weights to and from safetensors, in the layout of the Hugging Face hub, streamed."""

from .load import load_safetensors
from .save import save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
