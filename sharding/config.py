"""The options of `fully_shard`, checked and resolved."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from torch import nn

from .arguments import require_flag, require_number
from .placements import Placements, resolve_strategy
from .precision import MixedPrecisionPolicy, require_policy
from .runtime import RuntimeOptions


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """All options, resolved."""

    placements: Placements
    policy: MixedPrecisionPolicy
    classes: tuple[type[nn.Module], ...]
    reshard_after_forward: bool | None
    bucket_bytes: int | None
    overlap_grad_reduce: bool
    runtime: RuntimeOptions

    def described(self) -> dict[str, str]:
        """The options by their names in `fully_shard`, to compare between ranks."""
        mib = None if self.bucket_bytes is None else self.bucket_bytes / 2**20
        options = {
            "zero_dp_strategy": self.placements.name,
            "mixed_precision_policy": self.policy,
            "fsdp_unit_modules": self.classes,
            "reshard_after_forward": self.reshard_after_forward,
            "bucket_mib": mib,
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.runtime.overlap_param_gather,
            "prefetch": self.runtime.prefetch,
            "ranks_may_differ": self.runtime.ranks_may_differ,
        }
        return {name: f"{value!r}" for name, value in options.items()}


def resolve_config(
    strategy: int | str,
    policy: MixedPrecisionPolicy | None,
    classes: tuple[type[nn.Module], ...],
    *,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
    reshard_after_forward: bool | None,
    bucket_mib: float | None,
    prefetch: int,
    ranks_may_differ: bool,
) -> ShardConfig:
    """Resolve the options of `fully_shard`; raises what that says about them."""
    if policy is not None:
        require_policy(policy)
    require_flag("overlap_grad_reduce", overlap_grad_reduce)
    require_flag("overlap_param_gather", overlap_param_gather)
    require_flag("ranks_may_differ", ranks_may_differ)
    if reshard_after_forward is not None:
        require_flag("reshard_after_forward", reshard_after_forward)
    if bucket_mib is not None:
        expected = "None or a positive number of MiB"
        require_number("bucket_mib", bucket_mib, expected, lambda mib: 0 < mib < math.inf)
    expected = "a whole number of at least 0"
    require_number(
        "prefetch", prefetch, expected, lambda n: n >= 0 and isinstance(n, numbers.Integral)
    )
    return ShardConfig(
        placements=resolve_strategy(strategy),
        policy=policy or MixedPrecisionPolicy(),
        classes=classes,
        reshard_after_forward=reshard_after_forward,
        bucket_bytes=None if bucket_mib is None else int(bucket_mib * 2**20),
        overlap_grad_reduce=overlap_grad_reduce,
        runtime=RuntimeOptions(
            prefetch=int(prefetch),
            overlap_param_gather=overlap_param_gather,
            ranks_may_differ=ranks_may_differ,
        ),
    )
