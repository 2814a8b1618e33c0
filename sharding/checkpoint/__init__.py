"""Checkpoints: what is saved, how it lies on disk, and what is checked before it is loaded."""

from .save_load import full_state_dict, load_checkpoint, save_checkpoint

__all__ = ["full_state_dict", "load_checkpoint", "save_checkpoint"]
