"""sidestream: sharded data-parallel training for PyTorch. See `fully_shard`."""

from .sharding import (
    CommunicationError,
    MixedPrecisionPolicy,
    ShardedTensor,
    clip_grad_norm_,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    no_sync,
    summary,
)

__all__ = [
    "CommunicationError",
    "MixedPrecisionPolicy",
    "ShardedTensor",
    "clip_grad_norm_",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "no_sync",
    "summary",
]
__version__ = "0.1.0"
