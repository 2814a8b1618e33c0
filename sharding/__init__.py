"""Ranks, modules, time: what shards a model and moves its parameters and gradients."""

from .checkpoint import full_state_dict, load_checkpoint, remove_old_checkpoints, save_checkpoint
from .data_parallel_groups import shorten_flight_record
from .entries import gathered, register_forward_method
from .errors import CommunicationError, DivergentUseError, NonFiniteGradientError
from .fully_shard import (
    explain,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    is_sharded,
    no_sync,
    reset_error_feedback,
    skipped_steps,
)
from .message_wire import MessageWire
from .optim.adamw import AdamW
from .optim.grad_norm import clip_grad_norm_
from .precision import MixedPrecisionPolicy
from .safetensors import load_safetensors, save_safetensors
from .summary import summary
from .tensor.sharded_tensor import ShardedTensor
from .wire import Wire
from .wire_choice import WireRule

__all__ = [
    "AdamW",
    "CommunicationError",
    "DivergentUseError",
    "MessageWire",
    "MixedPrecisionPolicy",
    "NonFiniteGradientError",
    "ShardedTensor",
    "Wire",
    "WireRule",
    "clip_grad_norm_",
    "explain",
    "full_state_dict",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "gathered",
    "is_sharded",
    "load_checkpoint",
    "load_safetensors",
    "no_sync",
    "register_forward_method",
    "remove_old_checkpoints",
    "reset_error_feedback",
    "save_checkpoint",
    "save_safetensors",
    "shorten_flight_record",
    "skipped_steps",
    "summary",
]
