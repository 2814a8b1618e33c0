"""sidestream: sharded data-parallel training for PyTorch. See `fully_shard`."""

from .sharding import (
    CommunicationError,
    MixedPrecisionPolicy,
    ShardedTensor,
    clip_grad_norm_,
    explain,
    full_state_dict,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    gathered,
    load_checkpoint,
    load_safetensors,
    no_sync,
    register_forward_method,
    remove_old_checkpoints,
    save_checkpoint,
    save_safetensors,
    summary,
)

__all__ = [
    "CommunicationError",
    "MixedPrecisionPolicy",
    "ShardedTensor",
    "clip_grad_norm_",
    "explain",
    "full_state_dict",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "gathered",
    "load_checkpoint",
    "load_safetensors",
    "no_sync",
    "register_forward_method",
    "remove_old_checkpoints",
    "save_checkpoint",
    "save_safetensors",
    "summary",
]
__version__ = "0.1.0"
