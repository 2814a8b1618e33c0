"""Ranks, modules, time: what shards a model and moves its parameters and gradients."""

from .checkpoint import full_state_dict, load_checkpoint, remove_old_checkpoints, save_checkpoint
from .config import Experimental, ModelParallelConfig
from .data_parallel import DistributedDataParallel
from .data_parallel_base import DataParallelBase
from .data_parallel_config import DistributedDataParallelConfig
from .data_parallel_groups import shorten_flight_record
from .entries import gathered, register_forward_method
from .errors import CommunicationError, DivergentUseError, NonFiniteGradientError
from .finalize_model_grads import finalize_model_grads
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
from .fused_gradients import main_grad
from .gradient_checks import largest_own_gradient
from .kept_step import KeptStep, keep_step
from .message_wire import MessageWire
from .nccl_allocator import nccl_mem_pool
from .optim.adamw import AdamW
from .optim.grad_norm import clip_grad_norm_
from .precision import MixedPrecisionPolicy
from .process_groups import ProcessGroupCollection, initialize_model_parallel
from .rank_grid import RankGrid
from .reduce_scatter import reduce_scatter_with_fp32_accumulation
from .safetensors import load_safetensors, save_safetensors
from .summary import summary
from .tensor.sharded_tensor import ShardedTensor
from .torch_fully_sharded import TorchFullyShardedDataParallel, TorchFullyShardedDataParallelConfig
from .wire import Wire
from .wire_choice import WireRule

__all__ = [
    "AdamW",
    "CommunicationError",
    "DataParallelBase",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DivergentUseError",
    "Experimental",
    "KeptStep",
    "MessageWire",
    "MixedPrecisionPolicy",
    "ModelParallelConfig",
    "NonFiniteGradientError",
    "ProcessGroupCollection",
    "RankGrid",
    "ShardedTensor",
    "TorchFullyShardedDataParallel",
    "TorchFullyShardedDataParallelConfig",
    "Wire",
    "WireRule",
    "clip_grad_norm_",
    "explain",
    "finalize_model_grads",
    "full_state_dict",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "gathered",
    "initialize_model_parallel",
    "is_sharded",
    "keep_step",
    "largest_own_gradient",
    "load_checkpoint",
    "load_safetensors",
    "main_grad",
    "nccl_mem_pool",
    "no_sync",
    "reduce_scatter_with_fp32_accumulation",
    "register_forward_method",
    "remove_old_checkpoints",
    "reset_error_feedback",
    "save_checkpoint",
    "save_safetensors",
    "shorten_flight_record",
    "skipped_steps",
    "summary",
]
