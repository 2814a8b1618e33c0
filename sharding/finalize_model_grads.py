"""What is done to gradients between a step's last backward and the optimizer, in the order of
Megatron-Core's function of that name.

    1 groups      found; one that is needed and unset is named before anything changes
    2 exchange    `finish_grad_sync` of each chunk
    3 - 7         sums over pipeline and tensor parallelism, one a row of `replicated_grads.KINDS`
    8 routers     `expert_bias` follows the counts of tokens, which begin anew
    9 resets      what modules keep for one step
   10 tokens      all gradients times 1 / their number in the batch of all ranks

No step reads a value of a gradient on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .arguments import kind_of, require_count, require_number
from .data_parallel_base import DataParallelBase
from .errors import communicating
from .process_groups import ProcessGroupCollection, require_groups
from .replicated_grads import (
    agree_on,
    find_replicas,
    group_with_others,
    require_same,
    sum_gradients,
)

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def finalize_model_grads(
    model: DataParallelBase | Sequence[DataParallelBase],
    num_tokens: int | Tensor | None = None,
    process_groups: ProcessGroupCollection | None = None,
    *,
    expert_bias_update_rate: float = 1e-3,
) -> None:
    """Bring the gradients of `model` to what the optimizer is to see (a collective).

    model: what this rank holds, a chunk for each stage of a virtual pipeline. num_tokens: how many
    tokens this rank's batch had, an integer or one in a tensor; it counts on the last pipeline
    stage alone. Not None divides gradients by the number of all data-parallel ranks, at least 1:
    the loss is then a sum over tokens, and the chunks' configs have `calculate_per_token_loss`, so
    that their exchange does not average. Give it on all ranks or none. process_groups: a
    `ProcessGroupCollection`, of which only what the model's parameters need is asked for; None is
    that of the chunks, and without one all ranks are data-parallel and nothing else.
    expert_bias_update_rate: what is added to the bias of an expert with fewer tokens than the
    average, and taken from one with more.

    Ranks of a group that share parameters must all mark them: one that others wait for is told
    when the group's time limit ends.

    Raises:
        TypeError: the model is no `DataParallelBase`, num_tokens no number, process_groups none.
        ValueError: no chunks; several counts, a negative one or a fraction; one for gradients that
            are means; a negative rate; ranks of a group that share other parameters or, such as
            stages that cut a tied embedding differently, other parts.
        AttributeError: a group that is needed is unset.
        RuntimeError: gradients were accumulated under `no_sync` and not exchanged.
        CommunicationError: a rank is gone.
    """
    chunks = _chunks_of(model)
    if process_groups is None:
        process_groups = chunks[0].process_groups
    require_groups(process_groups)
    expected = "a number of at least 0"
    require_number("expert_bias_update_rate", expert_bias_update_rate, expected, lambda x: x >= 0)
    replicas = find_replicas(chunks, process_groups)
    modules = [module for chunk in chunks for module in chunk.module.modules()]
    routers = [*filter(_is_router, modules)]
    across = group_with_others(process_groups, "tp_dp_cp") if routers else None
    if num_tokens is not None:
        count = _count(num_tokens, chunks)
        pipeline = group_with_others(process_groups, "pp")
        data_parallel = group_with_others(process_groups, "dp_cp")

    for chunk in chunks:
        chunk.finish_grad_sync()
    for one in replicas:
        agree_on(one)  # on all before the first sum
    for one in replicas:
        sum_gradients(one)
    if routers:
        update_expert_bias(routers, across, expert_bias_update_rate)
    for module in modules:
        if callable(reset := getattr(module, "reset_global_aux_loss_tracker", None)):
            reset()
    if num_tokens is not None:
        scale_by_tokens(chunks, count, pipeline, data_parallel)


def _chunks_of(model: object) -> list[DataParallelBase]:
    chunks: list[Any] = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
    if not chunks or not all(isinstance(chunk, DataParallelBase) for chunk in chunks):
        found = ", ".join(map(kind_of, chunks)) or "none"
        raise (TypeError if chunks else ValueError)(
            f"model: expected a DataParallelBase or a list of at least one, got {found}; wrap the "
            "module in DistributedDataParallel"
        )
    return chunks


def _is_router(module: nn.Module) -> bool:
    """Whether it has an `expert_bias` and a count of tokens, of as many experts."""
    marks = ("expert_bias", "local_tokens_per_expert")
    return all(getattr(module, mark, None) is not None for mark in marks)


@torch.no_grad()
def update_expert_bias(
    routers: Sequence[Any], group: dist.ProcessGroup | None, rate: float
) -> None:
    """expert_bias += rate * sign(average - tokens): for each router, with the tokens that each
    expert got on all ranks of `group` (None: this one alone), whose counts then begin at 0 again.

    As Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024.
    Each router: `expert_bias` and `local_tokens_per_expert`, [experts], any dtype.

    Raises:
        ValueError: ranks hold other routers.
        CommunicationError: a rank is gone.
    """
    counts = [router.local_tokens_per_expert for router in routers]
    # FP64 holds sums of counts as they are, in whatever order a backend adds them.
    tokens = torch.cat([count.to(torch.float64) for count in counts])
    if group is not None:
        what = "biases of experts"
        told = [f"{len(count)} experts" for count in counts]
        require_same(told, what, group, fix="build the same routers on these ranks")
        with communicating(f"sum of tokens for {what}"):
            dist.all_reduce(tokens, group=group)
    for router, total in zip(routers, tokens.split([*map(len, counts)]), strict=True):
        sign = torch.sign(total.mean() - total)
        router.expert_bias.add_(sign.to(router.expert_bias.dtype), alpha=rate)
        router.local_tokens_per_expert.zero_()


def scale_by_tokens(
    chunks: Sequence[DataParallelBase],
    count: Tensor,
    pipeline: dist.ProcessGroup | None,
    data_parallel: dist.ProcessGroup | None,
) -> None:
    """Multiply all gradients by 1 / count, rounded to FP32: the `count` of tokens [], int64, that
    the last rank of `pipeline` has, summed over `data_parallel`, and at least 1. Overwritten.

    Raises:
        CommunicationError: a rank is gone.
    """
    with communicating("sum of the number of tokens"):
        if pipeline is not None:
            last = dist.get_world_size(pipeline) - 1
            dist.broadcast(count, group=pipeline, group_src=last)
        if data_parallel is not None:
            dist.all_reduce(count, group=data_parallel)
    factor = count.clamp(min=1).to(torch.float64).reciprocal().to(torch.float32)
    for chunk in chunks:
        chunk.scale_gradients(factor)


def _count(num_tokens: int | Tensor, chunks: Sequence[DataParallelBase]) -> Tensor:
    """A copy, where the gradients are."""
    if any(chunk.averages_gradients for chunk in chunks):
        raise ValueError(
            "num_tokens: expected None for a model that averages gradients over the ranks, got "
            f"{num_tokens!r}, by which they would be divided as well; make the model with a config "
            "of calculate_per_token_loss=True, or leave it out"
        )
    if not isinstance(num_tokens, Tensor):
        require_count("num_tokens", num_tokens, 0)
    elif num_tokens.numel() != 1 or num_tokens.dtype not in _INTEGERS:
        raise ValueError(
            f"num_tokens: expected one whole number, got {num_tokens.dtype} of shape "
            f"{tuple(num_tokens.shape)}; pass the sum of the counts"
        )
    device = next((param.device for param in chunks[0].parameters()), None)
    return torch.as_tensor(num_tokens).detach().reshape(()).to(device, torch.int64, copy=True)
