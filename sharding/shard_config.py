"""The options of `fully_shard`, checked and resolved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from .arguments import require_count, require_flag, require_number
from .modules.init_stages import Initialiser, require_initialiser
from .placements import Held, Strategy, resolve_outer, resolve_strategy
from .precision import MixedPrecisionPolicy, require_policy
from .wire import Wire
from .wire_choice import bytes_on

# Below it an exchange costs more to start than its bytes take.
SPLIT_ROOT_MIB = 16.0


@dataclass(frozen=True, slots=True)
class ReverseBuckets:
    """Buckets of parameters in reverse order of registration, as backward mostly comes to them,
    each closed once it has `least` elements, or bytes (None: all in one), or as many elements as
    make at most `count` buckets. A parameter marked `shared_embedding` has a bucket of its own.
    """

    least: int | None
    counts_bytes: bool = False
    count: int | None = None

    def least_numel(self, itemsize: int, numel: int) -> int | None:
        """The elements, of `itemsize` bytes each, that close a bucket of `numel` in all."""
        if self.count is not None:
            return -(-numel // self.count)
        if self.least is None or not self.counts_bytes:
            return self.least
        return -(-self.least // itemsize)


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Where units are cut, in bytes of compute-dtype parameters: buckets of at most so many, and
    the root's modules of at least so many apart; None: not at all. `reverse_buckets`: cut so in
    place of `bucket_bytes`. `whole_numel`: what the length of a unit's flat buffer is a multiple
    of, in elements.
    """

    bucket_bytes: int | None = None
    split_root_bytes: int | None = None
    reverse_buckets: ReverseBuckets | None = None
    whole_numel: int = 1


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How far the runtime overlaps. `prefetch`: gathers started ahead of the unit in use.
    `strategy`: what it is called in summaries. `nonfinite_grads`: as `MixedPrecisionPolicy` has it.
    """

    strategy: str
    prefetch: int
    overlap_param_gather: bool
    ranks_may_differ: bool = False
    nonfinite_grads: str = "keep"


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """All options, resolved. `outer`: what is held along the outer axis, if there is one.
    `divide_factor`: of the sum of gradients over all ranks (None: how many there are). `native`:
    whether the backend sums. `symmetric_memory`: "off", "auto" or "on".
    """

    strategy: Strategy
    outer: Held | None
    policy: MixedPrecisionPolicy
    classes: tuple[type[nn.Module], ...]
    reshard_after_forward: bool | None
    sizes: UnitSizes
    overlap_grad_reduce: bool | str
    initialiser: Initialiser
    divide_factor: float | None
    native: bool
    symmetric_memory: str
    runtime: RuntimeOptions

    def described(self) -> dict[str, str]:
        """The options by their names in `fully_shard`, to compare between ranks."""
        options = {
            "zero_dp_strategy": self.strategy.name,
            "outer_dp_sharding_strategy": self.outer,
            "gradient_divide_factor": self.divide_factor,
            "reduce": "native" if self.native else "exact",
            "symmetric_memory": self.symmetric_memory,
            "mixed_precision_policy": self.policy,
            "grad_wire": ", ".join(map(bytes_on, _grad_wires(self.policy))),
            "fsdp_unit_modules": self.classes,
            "reshard_after_forward": self.reshard_after_forward,
            "bucket_mib": _mib(self.sizes.bucket_bytes),
            "split_root_mib": _mib(self.sizes.split_root_bytes),
            "bucket_size": self.sizes.reverse_buckets,
            "pad_buckets_for_high_nccl_busbw": self.sizes.whole_numel,
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.runtime.overlap_param_gather,
            "prefetch": self.runtime.prefetch,
            "ranks_may_differ": self.runtime.ranks_may_differ,
            # Functions are other objects on every rank.
            "init_model_with_meta_device": "a function"
            if callable(self.initialiser)
            else self.initialiser,
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
    classes: tuple[type[nn.Module], ...] = (),
    *,
    outer_dim: str | None,
    outer_strategy: str = "no_shard",
    reduce: str = "exact",
    symmetric_memory: str = "off",
    gradient_divide_factor: float | None,
    overlap_grad_reduce: bool | str,
    overlap_param_gather: bool,
    reshard_after_forward: bool | None = None,
    bucket_mib: float | None = None,
    split_root_mib: float | None = None,
    prefetch: int = 1,
    ranks_may_differ: bool = False,
    initialiser: Initialiser = False,
) -> ShardConfig:
    """Resolve the options of `fully_shard`; raises what that says about them."""
    if policy is not None:
        require_policy(policy)
    if overlap_grad_reduce != "pipelined":
        require_flag("overlap_grad_reduce", overlap_grad_reduce, "True, False or 'pipelined'")
    require_flag("overlap_param_gather", overlap_param_gather)
    require_flag("ranks_may_differ", ranks_may_differ)
    if reshard_after_forward is not None:
        require_flag("reshard_after_forward", reshard_after_forward)
    if gradient_divide_factor is not None:
        expected = "None or a positive number"
        require_number(
            "gradient_divide_factor", gradient_divide_factor, expected, lambda n: 0 < n < math.inf
        )
    level = resolve_strategy(strategy)
    require_count("prefetch", prefetch, 0)
    require_initialiser(initialiser)
    _require_symmetric_memory(symmetric_memory, reduce)
    return ShardConfig(
        strategy=level,
        outer=resolve_outer(level, outer_strategy, outer_dim),
        policy=policy or MixedPrecisionPolicy(),
        classes=classes,
        reshard_after_forward=reshard_after_forward,
        sizes=UnitSizes(_bytes("bucket_mib", bucket_mib), _bytes("split_root_mib", split_root_mib)),
        overlap_grad_reduce=overlap_grad_reduce,
        initialiser=initialiser,
        divide_factor=gradient_divide_factor,
        native=_is_native(reduce, policy),
        symmetric_memory=symmetric_memory,
        runtime=RuntimeOptions(
            strategy=level.name + (f", outer {outer_strategy}" if outer_dim is not None else ""),
            prefetch=int(prefetch),
            overlap_param_gather=overlap_param_gather,
            ranks_may_differ=ranks_may_differ,
            nonfinite_grads=(policy or MixedPrecisionPolicy()).nonfinite_grads,
        ),
    )


def _is_native(reduce: str, policy: MixedPrecisionPolicy | None) -> bool:
    if reduce not in ("exact", "native"):
        raise ValueError(
            f"reduce: expected 'exact' or 'native', got {reduce!r}; pass 'exact' for sums in FP32 "
            "in rank order, 'native' for the backend's own"
        )
    wires = [] if policy is None else _grad_wires(policy)
    if reduce == "native" and wires:
        raise ValueError(
            f"reduce: expected 'exact' with MixedPrecisionPolicy(grad_wire={wires[0]!r}), which "
            "only itself can sum, got 'native'; leave one of them out"
        )
    return reduce == "native"


def _grad_wires(policy: MixedPrecisionPolicy) -> list[Wire]:
    """Those that a policy chooses for gradients, those of its rules too."""
    chosen = (policy.grad_wire, *(rule.grad_wire for rule in policy.wire_rules))
    return [wire for wire in chosen if isinstance(wire, Wire)]


def _require_symmetric_memory(mode: object, reduce: str) -> None:
    if mode not in ("off", "auto", "on"):
        raise ValueError(
            f"symmetric_memory: expected 'off', 'auto' or 'on', got {mode!r}; pass 'auto' to have "
            "it where it is there"
        )
    if mode == "on" and reduce == "native":
        raise ValueError(
            "symmetric_memory: expected 'off' or 'auto' with reduce='native', where the backend "
            "moves and sums, got 'on'; leave one of them out"
        )
