"""The public entry: validate everything, then build the units, attach the hooks, re-point the
optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.tuned import fingerprint
from .agreement import check_ranks_agree
from .arguments import require_forward, require_module
from .backward_inputs import follow_sharded_inputs
from .build import build_runtime
from .data_parallel_base import DataParallelBase
from .expert_ranks import ModelRanks, check_experts, model_ranks
from .explanation import Explanation
from .initialisation import plan_initialisation
from .mesh_axes import require_mesh
from .modules.cached_params import find_cached_params
from .modules.init_stages import Initialiser
from .modules.partition import (
    GroupPlan,
    ParamEntry,
    collect_params,
    partition,
    tree_signature,
)
from .modules.rank_dependent_writes import refuse_rank_dependent_writes
from .modules.tree_watch import watches_of
from .modules.uncompiled import without_compile
from .modules.unit_classes import UnitClass, resolve_unit_classes
from .monitor import MONITOR
from .optim.flat_runs import Located, Location, locate_params, sharded_locations
from .optim.kinds import check_elementwise, describe_options
from .optim.nonfinite import num_skipped
from .optim.optimizer import adopt, bind, is_bound, watch_all_steps
from .precision import MixedPrecisionPolicy
from .runtime import Runtime
from .shard_config import SPLIT_ROOT_MIB, ShardConfig, resolve_config
from .slow_options import note_connections, note_missing_units
from .tensor.sharded_tensor import ShardedTensor
from .wire_choice import choose_wires

_RUNTIMES: weakref.WeakKeyDictionary[nn.Module, Runtime] = weakref.WeakKeyDictionary()


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    outer_dp_sharding_strategy: str = "no_shard",
    ranks_per_node: int | None = None,
    reduce: str = "exact",
    symmetric_memory: str = "off",
    gradient_divide_factor: float | None = None,
    fsdp_unit_modules: Iterable[UnitClass] | None = None,
    zero_dp_strategy: int | str = 3,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    overlap_grad_reduce: bool | str = True,
    overlap_param_gather: bool = True,
    reshard_after_forward: bool | None = None,
    bucket_mib: float | None = None,
    split_root_mib: float | None = SPLIT_ROOT_MIB,
    prefetch: int = 1,
    ranks_may_differ: bool = False,
    elementwise: bool = False,
    init_model_with_meta_device: Initialiser = False,
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Shard `module` over the data-parallel ranks, in place, and `optimizer` with it.

    The module keeps its class, parameter names and state-dict keys. Outside forward and backward
    its parameters are `ShardedTensor`s of the main dtype; inside a unit's forward and backward they
    are plain, full ones. All ranks start from rank 0's values. Every backward outside `no_sync`
    averages the gradients over the ranks: each rank's contribution is rounded to the wire dtype,
    and the sum is taken in FP32, in rank order.

    Args:
        module: the whole model, on CPU or the rank's GPU, not sharded yet; on the meta device with
            `init_model_with_meta_device`.
        optimizer: an elementwise optimizer over its parameters; keeps its class, groups, options
            and state.
        device_mesh: mesh to shard over (None: all ranks, of a process group that is made here
            if torchrun has started them; without either, world size 1).
        dp_shard_dim: name of the mesh dimension to shard over, which may be one that dimensions
            were flattened to; needed when the mesh has several.
        dp_outer_dim: name of the dimension along which copies of the shards lie (HSDP). Gradients
            are averaged over both: summed inside the shard axis first, then along this one.
        expt_device_mesh: for parameters marked as an expert's (`param.allreduce = False`), the mesh
            of the ranks that hold the same ones: with the dimensions named above, or only one.
            Gradients are summed over it, yet divided as all others are. Its ranks are among the
            data-parallel ranks, or have these among them. Such models are saved rank by rank.
        outer_dp_sharding_strategy: 'no_shard', or 'optim' to divide main parameters, gradients and
            optimizer state along `dp_outer_dim` too (HFSDP).
        ranks_per_node: how many neighbours of the shard axis exchange among themselves first, then
            with their like in other blocks; fewer bytes between nodes, and another order of sums.
            None: as torchrun says, if the axis spans nodes with equally many ranks side by side.
            1: never.
        reduce: 'exact': sums in FP32, in rank order. 'native': the backend's own reduce-scatter,
            in its own order and precision.
        symmetric_memory: whether sums of gradients read what the other GPUs have packed where it
            lies, in place of messages that are received first: the same bits, no buffer to receive
            into, no multiprocessors for a collective; two of the largest messages are held for good
            (four with "pipelined"). Needs GPUs of one machine that read each other's memory. 'off':
            never; the default, as nobody has measured the others on GPUs yet. 'auto': along the
            axes where all ranks can; `summary` says which, and why not elsewhere. 'on': refused
            where the ranks of the first axis (of the shard axis, or of a node with
            `ranks_per_node`) cannot; sums over axes beyond it use it where they can.
        gradient_divide_factor: what the sum over all data-parallel ranks is divided by (None: how
            many there are, so gradients are means; 1: they are sums).
        fsdp_unit_modules: classes whose instances are gathered and reduced as one unit each; or
            their import paths, or bare names such as 'LlamaDecoderLayer' and the names in a model's
            `_no_split_modules`, for every class of that name in the model. None: the whole module
            is one unit, and nothing overlaps.
        zero_dp_strategy: 0 'no_shard', 1 'optim', 2 'optim_grads', 3 'optim_grads_params'.
        mixed_precision_policy: dtypes of compute, main parameters and gradients, and the wires.
        overlap_grad_reduce: exchange gradients beside backward. "pipelined": on a GPU an exchange
            also starts while the one before is being summed, for a second pair of buffers; worth it
            where exchanges take longer than backward.
        overlap_param_gather: gather parameters beside compute.
        reshard_after_forward: free gathered parameters after forward (ZeRO-3 only). None: units
            do; the root, which backward needs first, does not.
        bucket_mib: split a unit into messages of at most so many MiB of compute-dtype parameters.
        split_root_mib: beside `fsdp_unit_modules`, give each module outside the units that has at
            least so many MiB of trainable parameters in the compute dtype (an embedding, a head)
            a unit of its own, so that a head's gradient is exchanged while backward runs; a tied
            weight is one. They stay gathered with the root, so whoever uses their weights without
            calling them finds them. None: the root is one unit. No bit depends on it.
        prefetch: how many units ahead of the one in use are gathered (ZeRO-3).
        ranks_may_differ: ranks may use other units than the others, in another order or more often
            (experts, dropped layers). Costs ZeRO-3 a small message before each gather, and no
            gather is ahead of its use. Without it ranks that differ get a `DivergentUseError`.
        elementwise: vouch that an optimizer class unknown to sidestream updates each element by
            itself.
        init_model_with_meta_device: how parameters and buffers on the meta device get their values,
            whole and with few of them in memory at a time; all must be set. True: by
            `reset_parameters` or `_reset_parameters` of each module that has some, and of modules
            around them whose constructor calls it, children first. With one seed these are the
            bits of constructors that end with it; of tied parameters the first module's count. A
            function: it is called with each module in that order, as by `module.apply`, and sets
            what is the module's own, or also its children's where these are in the same unit.
            Without `fsdp_unit_modules` it has the whole model in memory at once. What has values
            on rank 0 keeps these, and may be on the meta device elsewhere.

    Returns:
        (module, optimizer), the objects passed in.

    Raises:
        ValueError: bad option, unit class that matches nothing, module without a forward,
            parameters that cannot be sharded or are on another GPU than the process group, mesh
            without those dimensions, experts without a mesh, foreign parameters in the optimizer,
            optimizer that is not elementwise, ranks whose models, meshes or options differ, tensors
            on the meta device that nothing sets. Nothing has been changed then.
        TypeError: an argument of the wrong type.
        RuntimeError: more ranks than GPUs.
    """
    require_module(module)
    require_forward(module)
    require_mesh(device_mesh, dp_shard_dim, dp_outer_dim)
    config = resolve_config(
        zero_dp_strategy,
        mixed_precision_policy,
        resolve_unit_classes(fsdp_unit_modules, module),
        outer_dim=dp_outer_dim,
        outer_strategy=outer_dp_sharding_strategy,
        reduce=reduce,
        symmetric_memory=symmetric_memory,
        gradient_divide_factor=gradient_divide_factor,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        reshard_after_forward=reshard_after_forward,
        bucket_mib=bucket_mib,
        split_root_mib=split_root_mib,
        prefetch=prefetch,
        ranks_may_differ=ranks_may_differ,
        initialiser=init_model_with_meta_device,
    )
    dims = device_mesh, dp_shard_dim, dp_outer_dim, expt_device_mesh
    ranks_of = functools.partial(model_ranks, *dims, ranks_per_node=ranks_per_node)
    shard(module, optimizer, config, ranks_of, elementwise=elementwise)
    return module, optimizer


def shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: ShardConfig,
    ranks_of: Callable[..., ModelRanks],
    *,
    elementwise: bool,
    told: Mapping[str, str] | None = None,
) -> Runtime:
    """Shard `module`, and `optimizer` with it, over `ranks_of(devices=...)`, which is given the
    devices of the parameters; raises what `fully_shard` says. told: options of others, which all
    ranks are to have alike too.
    """
    if optimizer is not None:
        check_elementwise(optimizer, declared=elementwise)
    root = without_compile(module)
    entries = _params_of(root, config.policy, takes_meta=bool(config.initialiser))
    plans = partition(root, entries, config.classes, config.policy, config.sizes)
    located = _locate(optimizer, plans, entries)
    ranks = ranks_of(devices={entry.param.device for entry in entries})
    options = {**config.described(), **(told or {}), "optimizer": describe_options(optimizer)}
    runtime = _build(root, entries, plans, config, ranks, options)
    if optimizer is not None and located is not None:
        adopt(optimizer, runtime, located)
    return runtime


def _params_of(
    root: nn.Module, policy: MixedPrecisionPolicy, *, takes_meta: bool
) -> list[ParamEntry]:
    entries = collect_params(root, takes_meta=takes_meta)
    if not entries:
        raise ValueError("module: expected at least one floating-point parameter, got none")
    find_cached_params(root, entries)
    wires = choose_wires(root, [(entry.name, entry.param) for entry in entries], policy)
    for entry, chosen in zip(entries, wires, strict=True):
        entry.wires = chosen
    return entries


def _build(
    root: nn.Module,
    entries: list[ParamEntry],
    plans: list[GroupPlan],
    config: ShardConfig,
    ranks: ModelRanks,
    options: Mapping[str, str],
) -> Runtime:
    """Shard `root` as all ranks agree, who compare `options`."""
    dense, groups = ranks.dense, ranks.dense.groups
    refuse_rank_dependent_writes(root, dense.world_size)
    signature = tree_signature(root, entries)
    options = {**options, **ranks.described()}
    check_ranks_agree(ranks.together, signature, options, fingerprint(groups.device))
    check_experts(ranks, entries, config)
    initialisation = plan_initialisation(root, plans, dense, config.initialiser)
    note_missing_units(config, groups)
    note_connections(config, groups)
    runtime = build_runtime(root, plans, ranks, config, initialisation)
    follow_sharded_inputs()
    _RUNTIMES[root] = runtime
    MONITOR.watch(runtime)
    watch_all_steps()
    return runtime


def _locate(
    optimizer: torch.optim.Optimizer | None, plans: list[GroupPlan], entries: list[ParamEntry]
) -> Located | None:
    if optimizer is None:
        return None
    locations = {
        id(entry.param): Location(unit, index)
        for unit, members in enumerate(members for plan in plans for members in plan.units)
        for index, entry in enumerate(members)
    }
    return locate_params(optimizer, locations, [entry.name for entry in entries])


def fully_shard_model(module: nn.Module, **options: object) -> nn.Module:
    """`fully_shard` for a model alone; same options, errors and effect. Returns `module`."""
    if "optimizer" in options:
        raise TypeError(
            "fully_shard_model: expected a module and options, got an optimizer; call "
            "fully_shard(module, optimizer)"
        )
    return fully_shard(module, None, **options)[0]  # type: ignore[arg-type]


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, *, elementwise: bool = False
) -> torch.optim.Optimizer:
    """Bind an optimizer that was made from a sharded module's parameters. Returns `optimizer`.

    Raises:
        ValueError: it holds parameters that are not one sharded module's (for example the ones
            from before `fully_shard`), it is bound already, it takes only some of the parameters
            of another bound optimizer, or it is not elementwise.
        RuntimeError: the module has parameters that it did not have when it was sharded.
    """
    check_elementwise(optimizer, declared=elementwise)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = next((param for param in params if isinstance(param, ShardedTensor)), None)
    if is_bound(optimizer):
        raise ValueError(
            "optimizer: expected one that is not bound yet, got one bound by fully_shard before"
        )
    for module, runtime in _RUNTIMES.items():
        if sharded is not None and id(sharded) in sharded_locations(runtime):
            for watch in watches_of(module):
                watch.check()
            bind(optimizer, runtime)
            return optimizer
    raise ValueError(
        "optimizer: expected parameters of a module that fully_shard has sharded, got none; make "
        "the optimizer from module.parameters() after fully_shard, or pass both to fully_shard "
        "together"
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether `module`, or a part of it, shows sharded parameters, as it does outside its forward,
    backward and `gathered`.
    """
    return any(isinstance(param, ShardedTensor) for param in module.parameters())


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside only add to this rank's own gradient, in the main gradients' dtype; no
    communication.

    The next backward outside exchanges the sum. What counts is where backward runs, not where
    forward ran. Clearing the gradients (`zero_grad`) drops the sum too.
    """
    runtime = runtime_of(module)
    before, runtime.sync = runtime.sync, False
    try:
        yield
    finally:
        runtime.sync = before


def explain(module: nn.Module, *, ask_others_s: float = 0.0) -> Explanation:
    """What a sharded module is doing on this rank: the states of its units, what is in flight since
    when, what it waits for, whose gradients have not come, what happened last. `print` it.

    For somebody who asks why nothing happens: no collective, and from any thread. ask_others_s: if
    not 0, have the other ranks' threads asked through the store and wait so long, in seconds, for
    who waits for whom (5 to 15 s where ranks are busy); 0: what was last known, and no wait.

    Raises:
        ValueError: `module` is not the one passed to `fully_shard`.
    """
    return MONITOR.explain(runtime_of(module), ask_others_s)


def reset_error_feedback(module: nn.Module) -> None:
    """Forget what the wires of a sharded module's gradients have lost to rounding and would add to
    the next ones (`MessageWire(..., error_feedback=...)`). For all ranks to call, after a change
    of the weights or the loss that makes gradients of before worthless.

    Raises:
        ValueError: `module` is not the one passed to `fully_shard`.
    """
    for unit in runtime_of(module).units:
        unit.reduction.reset_residual(range(len(unit.spec.names)))


def skipped_steps(module: nn.Module) -> int:
    """How many steps were left out since `fully_shard`, of all optimizers over a sharded module,
    since a gradient was not finite: `MixedPrecisionPolicy(nonfinite_grads="skip")`. Equal on all
    ranks. What a `torch.amp.GradScaler` leaves out is not counted.

    Raises:
        ValueError: `module` is not the one passed to `fully_shard`.
    """
    return num_skipped(runtime_of(module))


def runtimes() -> list[tuple[nn.Module, Runtime]]:
    """All sharded modules that are alive and their runtimes, in the order of `fully_shard`."""
    return list(_RUNTIMES.items())


def runtime_of(module: nn.Module) -> Runtime:
    """The runtime of a sharded module.

    Raises:
        ValueError: `module` is not the one that was passed to `fully_shard`, whether as it is or as
            `torch.compile` or a data-parallel model wrapped it.
    """
    root = without_compile(module) if isinstance(module, nn.Module) else None
    if isinstance(root, DataParallelBase):
        root = without_compile(root.module)
    runtime = None if root is None else _RUNTIMES.get(root)
    if runtime is None:
        raise ValueError(
            "module: expected the module that was passed to fully_shard, got a "
            f"{type(module).__name__} that was not; shard it first, or pass the outermost module"
        )
    return runtime
