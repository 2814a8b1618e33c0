"""Checkpoints: what is saved, how it lies on disk, and what is checked before it is loaded."""

from .load import load_checkpoint
from .pruning import remove_old_checkpoints
from .save import save_checkpoint
from .state import full_state_dict

__all__ = ["full_state_dict", "load_checkpoint", "remove_old_checkpoints", "save_checkpoint"]
