"""The options of `fully_shard`, checked and resolved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .partition import UnitClass, resolve_unit_classes
from .placements import Placements, resolve_strategy
from .precision import MixedPrecisionPolicy
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


def resolve_config(
    strategy: int | str,
    policy: MixedPrecisionPolicy | None,
    unit_modules: Iterable[UnitClass] | None,
    *,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
    reshard_after_forward: bool | None,
    bucket_mib: float | None,
    prefetch: int,
) -> ShardConfig:
    """Resolve the options of `fully_shard`; raises what that says about them."""
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            "mixed_precision_policy: expected a sidestream.MixedPrecisionPolicy, got "
            f"{type(policy).__module__}.{type(policy).__name__}"
        )
    if bucket_mib is not None and not bucket_mib > 0:
        raise ValueError(
            f"bucket_mib: expected None or a positive number of MiB, got {bucket_mib!r}"
        )
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch: expected a whole number of at least 0, got {prefetch!r}")
    return ShardConfig(
        placements=resolve_strategy(strategy),
        policy=policy or MixedPrecisionPolicy(),
        classes=resolve_unit_classes(unit_modules),
        reshard_after_forward=reshard_after_forward,
        bucket_bytes=None if bucket_mib is None else int(bucket_mib * 2**20),
        overlap_grad_reduce=overlap_grad_reduce,
        runtime=RuntimeOptions(prefetch=prefetch, overlap_param_gather=overlap_param_gather),
    )
