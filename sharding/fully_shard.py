"""The public entry: validate everything, then build the units, attach the hooks, re-point the optimizer."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..buffers import BufferPool, flat_layout
from ..kernels import pack_
from .collectives import Collectives
from .hooks import install_hooks, install_root_hooks
from .lanes import make_lane
from .optimizer import Location, check_elementwise, locate_params, rebind
from .partition import (
    GroupPlan,
    ParamEntry,
    UnitClass,
    collect_params,
    partition,
    resolve_unit_classes,
    tree_signature,
)
from .placements import Placement, Placements, resolve_strategy
from .precision import MixedPrecisionPolicy, resolve_dtypes
from .process_groups import data_parallel_groups
from .runtime import Runtime, RuntimeOptions, UnitGroup
from .sharded_tensor import ShardedTensor
from .unit import ParamSlot, Unit, UnitSpec

_logger = logging.getLogger("sidestream")
_RUNTIMES: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Config:
    """All options, resolved."""

    placements: Placements
    policy: MixedPrecisionPolicy
    classes: tuple[type[nn.Module], ...]
    reshard_after_forward: bool | None
    bucket_bytes: int | None
    overlap_grad_reduce: bool
    runtime: RuntimeOptions


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    fsdp_unit_modules: Iterable[UnitClass] | None = None,
    zero_dp_strategy: int | str = 3,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    reshard_after_forward: bool | None = None,
    bucket_mib: float | None = None,
    prefetch: int = 1,
    elementwise: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Shard `module` over the data-parallel ranks, in place, and `optimizer` with it.

    The module keeps its class, parameter names and state-dict keys. Outside forward and backward its
    parameters are `ShardedTensor`s of the main dtype; inside a unit's forward they are plain, full ones.
    All ranks start from rank 0's values. Every backward outside `no_sync` averages the gradients over the
    ranks: each rank's contribution is rounded to the wire dtype, and the sum is taken in FP32, in rank order.

    Args:
        module: the whole model, on CPU or the rank's GPU, not sharded yet.
        optimizer: an elementwise optimizer over its parameters; keeps its class, groups, options and state.
        device_mesh: mesh to shard over (None: all ranks; without a process group, world size 1).
        dp_shard_dim: name of the mesh dimension to shard over; needed when the mesh has several.
        fsdp_unit_modules: classes, or import paths of classes, whose instances are gathered and reduced as
            one unit each. None: the whole module is one unit, and nothing overlaps.
        zero_dp_strategy: 0 'no_shard', 1 'optim', 2 'optim_grads', 3 'optim_grads_params'.
        mixed_precision_policy: dtypes of compute, main parameters, gradients and wire.
        overlap_grad_reduce: exchange gradients beside backward.
        overlap_param_gather: gather parameters beside compute.
        reshard_after_forward: free gathered parameters after forward (ZeRO-3 only; None: units do, the root,
            which backward needs first, does not).
        bucket_mib: split a unit into messages of at most so many MiB of compute-dtype parameters.
        prefetch: how many units ahead of the one in use are gathered (ZeRO-3).
        elementwise: vouch that an optimizer class unknown to sidestream updates each element by itself.

    Returns:
        (module, optimizer), the objects passed in.

    Raises:
        ValueError: bad option, unit class that matches nothing, parameters that cannot be sharded, mesh
            without that dimension, foreign parameters in the optimizer, optimizer that is not elementwise,
            ranks whose models differ. Nothing has been changed then.
        TypeError: an argument of the wrong type.
        RuntimeError: more ranks than GPUs.
    """
    config = _resolve(
        zero_dp_strategy,
        mixed_precision_policy,
        fsdp_unit_modules,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        reshard_after_forward=reshard_after_forward,
        bucket_mib=bucket_mib,
        prefetch=prefetch,
    )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if optimizer is not None:
        check_elementwise(optimizer, declared=elementwise)
    entries = collect_params(module)
    if not entries:
        raise ValueError("module: expected at least one floating-point parameter, got none")
    plans = partition(module, entries, config.classes, config.policy, config.bucket_bytes)
    locations = {
        id(entry.param): Location(unit, index)
        for unit, members in enumerate(members for plan in plans for members in plan.units)
        for index, entry in enumerate(members)
    }
    located = locate_params(optimizer, locations, [e.name for e in entries]) if optimizer is not None else None
    groups = data_parallel_groups(device_mesh, dp_shard_dim)
    collectives = Collectives(groups)
    _check_ranks_agree(collectives, entries, config)
    if not config.classes and config.bucket_bytes is None and groups.world_size > 1 and groups.rank == 0:
        _logger.warning(
            "fully_shard: fsdp_unit_modules is None, so the whole module is one unit; pass the class of its "
            "blocks to overlap communication with compute"
        )
    runtime = _build(module, plans, collectives, config)
    _RUNTIMES[module] = runtime
    if optimizer is not None and located is not None:
        rebind(optimizer, runtime, located)
    return module, optimizer


def fully_shard_model(module: nn.Module, **options: object) -> nn.Module:
    """`fully_shard` for a model alone; same options, errors and effect. Returns `module`."""
    return fully_shard(module, None, **options)[0]  # type: ignore[arg-type]


def fully_shard_optimizer(optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> torch.optim.Optimizer:
    """Bind an optimizer that was made from a sharded module's parameters. Returns `optimizer`.

    Raises:
        ValueError: it holds parameters that are not one sharded module's (for example the ones from before
            `fully_shard`), it is bound already, or it is not elementwise.
    """
    check_elementwise(optimizer, declared=elementwise)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = next((param for param in params if isinstance(param, ShardedTensor)), None)
    for runtime in _RUNTIMES.values():
        if any(param is run.param for unit in runtime.units for run in unit.gradients.runs for param in params):
            raise ValueError("optimizer: expected one that is not bound yet, got one bound by fully_shard before")
        locations = {
            id(tensor): Location(position, index)
            for position, unit in enumerate(runtime.units)
            for index, tensor in enumerate(unit.sharded)
        }
        if sharded is not None and id(sharded) in locations:
            names = [name for unit in runtime.units for name in unit.spec.names]
            rebind(optimizer, runtime, locate_params(optimizer, locations, names))
            return optimizer
    raise ValueError(
        "optimizer: expected parameters of a module that fully_shard has sharded, got none; make the optimizer "
        "from module.parameters() after fully_shard, or pass both to fully_shard together"
    )


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside only add to this rank's own gradient, in the main gradients' dtype; no communication.

    The next backward outside exchanges the sum. What counts is where backward runs, not where forward ran.
    Clearing the gradients (`zero_grad`) drops the sum too.
    """
    runtime = runtime_of(module)
    before, runtime.sync = runtime.sync, False
    try:
        yield
    finally:
        runtime.sync = before


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime of a sharded module.

    Raises:
        ValueError: `module` is not the one that was passed to `fully_shard`.
    """
    runtime = _RUNTIMES.get(module)
    if runtime is None:
        raise ValueError(
            f"module: expected the module that was passed to fully_shard, got a {type(module).__name__} that "
            "was not; shard it first, or pass the outermost module"
        )
    return runtime


def _resolve(
    strategy: int | str,
    policy: MixedPrecisionPolicy | None,
    unit_modules: Iterable[UnitClass] | None,
    *,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
    reshard_after_forward: bool | None,
    bucket_mib: float | None,
    prefetch: int,
) -> _Config:
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            "mixed_precision_policy: expected a sidestream.MixedPrecisionPolicy, got "
            f"{type(policy).__module__}.{type(policy).__name__}"
        )
    if bucket_mib is not None and not bucket_mib > 0:
        raise ValueError(f"bucket_mib: expected None or a positive number of MiB, got {bucket_mib!r}")
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch: expected a whole number of at least 0, got {prefetch!r}")
    return _Config(
        placements=resolve_strategy(strategy),
        policy=policy or MixedPrecisionPolicy(),
        classes=resolve_unit_classes(unit_modules),
        reshard_after_forward=reshard_after_forward,
        bucket_bytes=None if bucket_mib is None else int(bucket_mib * 2**20),
        overlap_grad_reduce=overlap_grad_reduce,
        runtime=RuntimeOptions(prefetch=prefetch, overlap_param_gather=overlap_param_gather),
    )


def _check_ranks_agree(collectives: Collectives, entries: list[ParamEntry], config: _Config) -> None:
    signature = tree_signature(entries)
    options = repr(config)
    digest = hashlib.sha256(repr((signature, options)).encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12)]
    values = torch.tensor(numbers, dtype=torch.int64)
    if collectives.all_equal(values, "comparison of the ranks' models"):
        return
    everyone = collectives.gather_objects((signature, options))
    first_signature, first_options = everyone[0]  # type: ignore[misc]
    problems = []
    for rank, (other, other_options) in enumerate(everyone[1:], start=1):  # type: ignore[misc]
        problems += [f"rank {rank}: {difference}" for difference in _differences(first_signature, other)]
        if other_options != first_options:
            problems.append(f"rank {rank}: fully_shard's options are {other_options}, on rank 0 {first_options}")
    raise ValueError("fully_shard: expected the same model on every rank, compared with rank 0: " + "; ".join(problems))


def _differences(expected: list[tuple[object, ...]], got: list[tuple[object, ...]]) -> list[str]:
    ours = {entry[0]: entry[1:] for entry in got}
    theirs = {entry[0]: entry[1:] for entry in expected}
    found = [f"'{name}' is missing" for name in theirs if name not in ours]
    found += [f"'{name}' is unexpected" for name in ours if name not in theirs]
    found += [
        f"'{name}' has (shape, dtype, requires_grad) {ours[name]}, on rank 0 {theirs[name]}"
        for name in theirs
        if name in ours and ours[name] != theirs[name]
    ]
    return found or (["the parameters come in another order"] if expected != got else [])


@torch.no_grad()
def _build(module: nn.Module, plans: list[GroupPlan], collectives: Collectives, config: _Config) -> Runtime:
    device = collectives.groups.device
    pool = BufferPool(device)
    groups: list[UnitGroup] = []
    count = 0
    for plan in plans:
        units = []
        for members in plan.units:
            units.append(_build_unit(count, plan, members, collectives, pool, config))
            count += 1
        groups.append(UnitGroup(len(groups), plan.name, units, _reshards(plan, config), plan.is_root))
    lanes = (
        make_lane(device, config.runtime.overlap_param_gather),
        make_lane(device, config.overlap_grad_reduce),
    )
    runtime = Runtime(groups, collectives, pool, lanes, config.runtime)
    _attach(plans, runtime)
    _share_buffers(module, collectives)
    for plan, group in zip(plans, groups, strict=True):
        casts = config.policy.cast_forward_inputs
        install_hooks(plan.module, group, runtime, input_dtype=config.policy.param_dtype if casts else None)
    install_root_hooks(module, runtime, output_dtype=config.policy.output_dtype)
    return runtime


def _reshards(plan: GroupPlan, config: _Config) -> bool:
    if config.placements.params is not Placement.SHARD:
        return False
    return not plan.is_root if config.reshard_after_forward is None else config.reshard_after_forward


def _build_unit(
    index: int,
    plan: GroupPlan,
    members: list[ParamEntry],
    collectives: Collectives,
    pool: BufferPool,
    config: _Config,
) -> Unit:
    spec = UnitSpec(
        index=index,
        name=plan.name or "(root)",
        names=tuple(entry.name for entry in members),
        layout=flat_layout([entry.param.shape for entry in members], collectives.world_size),
        dtypes=resolve_dtypes(config.policy, members[0].param.dtype),
        placements=config.placements,
    )
    full = pool.lease(spec.layout.numel, spec.dtypes.main)
    full.zero_()
    pack_(full, [entry.param.detach().to(pool.device) for entry in members], spec.layout.offsets)
    if spec.layout.numel:
        collectives.broadcast(full, f"broadcast of the initial values of unit '{spec.name}'")
    return Unit(spec, full, collectives, pool)


def _attach(plans: list[GroupPlan], runtime: Runtime) -> None:
    reference = weakref.ref(runtime)

    def on_ready(unit: Unit) -> None:
        current = reference()
        assert current is not None
        current.unit_ready(unit)

    all_members = [members for plan in plans for members in plan.units]
    for unit, members in zip(runtime.units, all_members, strict=True):
        slots = tuple(
            ParamSlot(place._parameters, attribute, index)
            for index, entry in enumerate(members)
            for place, attribute in entry.places
        )
        unit.attach([entry.param.requires_grad for entry in members], slots, on_ready)


def _share_buffers(module: nn.Module, collectives: Collectives) -> None:
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                moved = buffer.to(collectives.groups.device)
                submodule._buffers[name] = moved
                if moved.numel():
                    collectives.broadcast(moved.detach(), f"broadcast of buffer '{name}'")
