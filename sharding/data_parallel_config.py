"""The options of `DistributedDataParallel`, under Megatron-Core's names, checked all at once.

    option                            what is exchanged, and when
    overlap_grad_reduce=False         nothing in backward; everything in `finish_grad_sync`
    overlap_grad_reduce=True          each bucket in backward, once its gradients are there
    use_distributed_optimizer=True    main parameters and optimizer state are divided (ZeRO-1)

Sums are taken in FP32, in rank order, whatever travels, and kept in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from ..buffers.param_and_grad_buffer import BUS_NUMEL
from .config import Count, Mebibytes, Patterns, checked_fields
from .precision import MixedPrecisionPolicy
from .shard_config import ReverseBuckets, UnitSizes
from .wire import Wire
from .wire_choice import require_param_wire, resolve_grad_wire

_LEAST_BUCKET_NUMEL = 40_000_000
_BUCKET_NUMEL_A_RANK = 1_000_000
ALL_PATTERNS = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedDataParallelConfig:
    """How gradients are reduced and parameters kept. Nothing ever changes it.

    Args:
        grad_reduce_in_fp32: gradients travel in FP32 (False: in the dtype that backward makes).
        grad_wire: how gradients travel instead, as `MixedPrecisionPolicy.grad_wire`.
        param_wire: how parameters are gathered, as `MixedPrecisionPolicy.param_wire`.
        overlap_grad_reduce: exchange buckets beside backward, from the first one on. Without it
            each rank adds up its own gradients, and `finish_grad_sync` exchanges the sum.
        overlap_param_gather: gather parameters beside forward: a module waits for the buckets of
            its own parameters alone.
        align_param_gather: that all gathers start together, which they do anyway: when
            `start_param_sync` is called, as schedules of pipelines do, else when forward begins.
        use_distributed_optimizer: each rank keeps a part of the main parameters and optimizer state
            (ZeRO-1), and the parameters are gathered in forward.
        num_distributed_optimizer_instances: how many copies of these parts there are. Neighbouring
            ranks share one; sums are taken inside a copy first, then over copies.
        bucket_size: elements that close a bucket; `bucket_mib`: MiB of gradients that do;
            `num_buckets`: at most so many of the parameters of one kind (dtype, wire, frozen or
            not), beside shared embeddings. At most one of them. None: 40 million elements, or one
            million for each rank if that is more, and one bucket a kind where nothing overlaps.
        pad_buckets_for_high_nccl_busbw: buckets are multiples of 2^16 elements.
        average_in_collective: gradients are means, which they are anyway: the sum is scaled once
            where it is rounded, in the exchange.
        calculate_per_token_loss: gradients are sums; `scale_gradients` divides by the tokens.
        check_for_nan_in_grad: raise `NonFiniteGradientError` on all ranks, with parameters, ranks
            and the number of the exchange, when a gradient was NaN or infinite. The host reads that
            late on a GPU: when the gradients after these have been exchanged.
        check_for_large_grads: warn when a parameter's largest gradient exceeds ten times the
            largest before.
        param_name_patterns_for_fp32_local_accumulation: names (as `fnmatch` has them, or "all") of
            parameters whose gradients are added up in FP32 on a rank before they travel in a
            narrower dtype. All are; a pattern without a parameter is refused.

    Raises:
        ValueError: what is wrong, all of it.
    """

    grad_reduce_in_fp32: bool = False
    grad_wire: Wire | str | None = None
    param_wire: str | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: Count = 1
    bucket_size: Count | None = None
    bucket_mib: Mebibytes | None = None
    num_buckets: Count | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    param_name_patterns_for_fp32_local_accumulation: Patterns = ()

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ValueError("DistributedDataParallelConfig: " + "; ".join(problems))

    def policy(self) -> MixedPrecisionPolicy:
        """The dtypes and wires."""
        return MixedPrecisionPolicy(
            grad_comm_dtype=torch.float32 if self.grad_reduce_in_fp32 else None,
            grad_wire=self.grad_wire,
            param_wire=self.param_wire,
        )

    def unit_sizes(self, world_size: int) -> UnitSizes:
        """Where a model is cut, over so many ranks."""
        whole = BUS_NUMEL if self.pad_buckets_for_high_nccl_busbw else 1
        size, overlaps = self.bucket_size, self.overlap_grad_reduce or self.overlap_param_gather
        if size is None and overlaps and self.num_buckets is None:
            size = max(_LEAST_BUCKET_NUMEL, _BUCKET_NUMEL_A_RANK * world_size)
        buckets = ReverseBuckets(size, count=self.num_buckets)
        if self.bucket_mib is not None:
            buckets = ReverseBuckets(math.ceil(self.bucket_mib * 2**20), counts_bytes=True)
        return UnitSizes(reverse_buckets=buckets, whole_numel=whole)


_SIZES = ("bucket_size", "bucket_mib", "num_buckets")
_PATTERNS = "param_name_patterns_for_fp32_local_accumulation"
_OPTIMIZER, _INSTANCES = "use_distributed_optimizer", "num_distributed_optimizer_instances"
_NEEDS = (
    ("overlap_param_gather", _OPTIMIZER, "else no parameter is gathered"),
    ("align_param_gather", "overlap_param_gather", "else there is no gather to align"),
    (_INSTANCES, _OPTIMIZER, "else every rank has a whole optimizer"),
)
_EXCLUDES = (
    ("average_in_collective", "calculate_per_token_loss", "gradients are means or sums"),
    ("grad_reduce_in_fp32", _PATTERNS, "with the first all are added up and sent in FP32"),
    ("grad_reduce_in_fp32", "grad_wire", "each says how gradients travel"),
)


def _problems(config: DistributedDataParallelConfig) -> Iterator[str]:
    checked, problems = checked_fields(config, DistributedDataParallelConfig)
    yield from problems
    known = fields(DistributedDataParallelConfig)
    given = {field.name for field in known if getattr(checked, field.name) != field.default}
    if len(sizes := [name for name in _SIZES if getattr(config, name) is not None]) > 1:
        yield f"expected at most one of {', '.join(sizes)}, which all size buckets; keep one"
    for name, needed, reason in _NEEDS:
        if name in given and needed not in given:
            yield f"{name} needs {needed}=True, {reason}: set that too, or leave {name} out"
    for one, other, reason in _EXCLUDES:
        if one in given and other in given:
            yield f"{one} and {other} exclude each other, as {reason}: leave one of them out"
    for check, name in ((resolve_grad_wire, "grad_wire"), (require_param_wire, "param_wire")):
        try:
            check(name, getattr(config, name))
        except (TypeError, ValueError) as error:
            yield str(error)
