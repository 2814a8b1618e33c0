"""What shards the model of a run and moves its gradients: sidestream, or PyTorch's own FSDP2.

Checkpoints of both are read by both: `save_checkpoint` and `load_checkpoint` take either.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..sharding import (
    MixedPrecisionPolicy,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    clip_grad_norm_,
    explain,
    fully_shard,
    largest_own_gradient,
    no_sync,
    summary,
)
from .data import MIB
from .launch.ranks import Replicas
from .model import Block
from .optimization import build_optimizer
from .options import TrainOptions

ASK_OTHERS_S = 10.0
"""How long who asks what a rank does may wait for the answers of the others."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE_QUEUE = (
    "warning: CUDA_DEVICE_MAX_CONNECTIONS=1 is set, so all streams of a GPU share one queue, and "
    "FSDP2's gathers and exchanges wait behind the computation that they should overlap; unset it"
)


@dataclass(frozen=True, slots=True)
class Engine:
    """A sharded model with its optimizer, and what is asked of it in different ways.

    no_sync: around all microbatches of a step but the last. clip: to a largest gradient norm;
    returns the norm before.
    described: how it shards, in a few words; remarks: lines for the user. explanation: what it is
    doing, for who asks. own_gradient: the largest of this rank's before they are summed; None: not
    known, or no matter. sent_bytes_per_step: of a rank; None: not known.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]
    clip: Callable[[float], Tensor]
    described: str
    remarks: tuple[str, ...]
    explanation: Callable[[], object] | None
    own_gradient: Callable[[], Tensor | None]
    sent_bytes_per_step: int | None


def replicas_of(options: TrainOptions) -> Replicas:
    """How the ranks of the run share the model."""
    return Replicas(options.dp_outer, options.outer_strategy, options.ranks_per_node)


def engine_for(options: TrainOptions, model: nn.Module, device: torch.device) -> Engine:
    """Shard `model`, which is on `device`; every rank calls this."""
    shard = _sharded_by_fsdp2 if options.use_torch_fsdp2 else _sharded_by_us
    return shard(options, model, device)


def _sharded_by_us(options: TrainOptions, model: nn.Module, device: torch.device) -> Engine:
    policy = MixedPrecisionPolicy(
        param_dtype=None if options.compute == "fp32" else DTYPES[options.compute],
        grad_wire=options.grad_wire,
        param_wire=options.param_wire,
        nonfinite_grads=options.nonfinite_grads,
    )
    module, optimizer = fully_shard(
        model,
        build_optimizer(model.parameters(), options.lr, options.weight_decay),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=options.zero,
        mixed_precision_policy=policy,
        overlap_grad_reduce=not options.no_overlap,
        overlap_param_gather=not options.no_overlap,
        bucket_mib=options.bucket_mib,
        **replicas_of(options).arguments(device),
    )
    assert optimizer is not None, "fully_shard returns the optimizer it was given"
    cost = summary(module)
    return Engine(
        module,
        optimizer,
        no_sync=partial(no_sync, module),
        clip=partial(clip_grad_norm_, module),
        described=f"ZeRO-{options.zero}, {options.compute} compute, {options.grad_wire} gradients "
        f"and {options.param_wire or options.compute} weights on the wire",
        remarks=(
            f"each rank: {cost.bytes_at_rest / MIB:.1f} MiB of parameters and gradients at rest, "
            f"{cost.sent_bytes_per_step / MIB:.1f} MiB sent a step",
        ),
        explanation=partial(explain, module, ask_others_s=ASK_OTHERS_S),
        # With "skip" one that is not finite is no reason to end.
        own_gradient=partial(largest_own_gradient, module)
        if options.nonfinite_grads == "raise"
        else lambda: None,
        sent_bytes_per_step=cost.sent_bytes_per_step,
    )


def _sharded_by_fsdp2(options: TrainOptions, model: nn.Module, device: torch.device) -> Engine:
    # Seconds of import, for those alone who ask for it.
    from torch.distributed import fsdp

    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=DTYPES[options.compute], reduce_dtype=torch.float32
    )
    module = TorchFullyShardedDataParallel(
        model,
        TorchFullyShardedDataParallelConfig(mp_policy=policy),
        mesh=replicas_of(options).arguments(device).get("device_mesh"),
        fsdp_unit_modules=[Block],
    )
    optimizer = build_optimizer(module.parameters(), options.lr, options.weight_decay)
    return Engine(
        module,
        optimizer,
        no_sync=module.no_sync,
        clip=partial(_clip_dtensors, list(module.parameters())),
        described=f"PyTorch's FSDP2, {options.compute} compute, fp32 gradients and "
        f"{options.compute} weights on the wire",
        remarks=(ONE_QUEUE,) if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" else (),
        explanation=None,
        own_gradient=lambda: None,
        sent_bytes_per_step=None,
    )


def _clip_dtensors(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    from torch.distributed.tensor import DTensor

    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
