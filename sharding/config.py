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

# Below it an exchange costs more to start than its bytes take.
SPLIT_ROOT_MIB = 16.0


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """All options, resolved."""

    placements: Placements
    policy: MixedPrecisionPolicy
    classes: tuple[type[nn.Module], ...]
    reshard_after_forward: bool | None
    bucket_bytes: int | None
    split_root_bytes: int | None
    overlap_grad_reduce: bool
    runtime: RuntimeOptions

    def described(self) -> dict[str, str]:
        """The options by their names in `fully_shard`, to compare between ranks."""
        options = {
            "zero_dp_strategy": self.placements.name,
            "mixed_precision_policy": self.policy,
            "fsdp_unit_modules": self.classes,
            "reshard_after_forward": self.reshard_after_forward,
            "bucket_mib": _mib(self.bucket_bytes),
            "split_root_mib": _mib(self.split_root_bytes),
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.runtime.overlap_param_gather,
            "prefetch": self.runtime.prefetch,
        }
        return {name: f"{value!r}" for name, value in options.items()}


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def _bytes(name: str, mib: float | None) -> int | None:
    if mib is None:
        return None
    expected = "None or a positive number of MiB"
    require_number(name, mib, expected, lambda value: 0 < value < math.inf)
    return int(mib * 2**20)


def resolve_config(
    strategy: int | str,
    policy: MixedPrecisionPolicy | None,
    classes: tuple[type[nn.Module], ...],
    *,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
    reshard_after_forward: bool | None,
    bucket_mib: float | None,
    split_root_mib: float | None,
    prefetch: int,
) -> ShardConfig:
    """Resolve the options of `fully_shard`; raises what that says about them."""
    if policy is not None:
        require_policy(policy)
    require_flag("overlap_grad_reduce", overlap_grad_reduce)
    require_flag("overlap_param_gather", overlap_param_gather)
    if reshard_after_forward is not None:
        require_flag("reshard_after_forward", reshard_after_forward)
    expected = "a whole number of at least 0"
    require_number(
        "prefetch", prefetch, expected, lambda n: n >= 0 and isinstance(n, numbers.Integral)
    )
    return ShardConfig(
        placements=resolve_strategy(strategy),
        policy=policy or MixedPrecisionPolicy(),
        classes=classes,
        reshard_after_forward=reshard_after_forward,
        bucket_bytes=_bytes("bucket_mib", bucket_mib),
        split_root_bytes=_bytes("split_root_mib", split_root_mib),
        overlap_grad_reduce=overlap_grad_reduce,
        runtime=RuntimeOptions(prefetch=int(prefetch), overlap_param_gather=overlap_param_gather),
    )
