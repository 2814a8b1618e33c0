"""From a partition to a running model: allocates units, shares rank 0's values, adds hooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, Placement, flat_layout
from .bits import once_in_memory
from .collectives import Collectives
from .expert_ranks import ModelRanks, is_expert
from .hooks import Entry, install_hooks, install_root_hooks
from .initialisation import Initialisation, Staging
from .lanes import LaneStreams, make_lane
from .message_wire import align_of
from .modules.cached_params import let_rnns_be
from .modules.hidden_writes import modules_that_use_data
from .modules.partition import GroupPlan, ParamEntry
from .modules.tree_watch import TreeWatch
from .optim import replaced_params
from .param_faces import ParamSlot
from .placements import unit_placements
from .precision import resolve_dtypes, resolve_param_wire, resolve_wires
from .routes import open_channels
from .runtime import Runtime
from .shard_config import ShardConfig
from .tensor.sharded_tensor import ShardedTensor
from .tensor.torch_state_dict import part_like, teach_torch
from .unit import Unit
from .unit_spec import UnitSpec
from .use_order import UnitGroup


@torch.no_grad()
def build_runtime(
    module: nn.Module,
    plans: list[GroupPlan],
    ranks: ModelRanks,
    config: ShardConfig,
    initialisation: Initialisation | None,
) -> Runtime:
    """Allocate the units of `plans`, put their parameters into the modules, attach the hooks.

    A plain parameter is let go of as soon as its unit has the values, so that a whole model and its
    shards need not fit at once.
    """
    device = ranks.dense.groups.device
    pool = BufferPool(device)
    maker = _UnitMaker(plans, ranks, pool, config)
    lanes = (
        make_lane(device, config.runtime.overlap_param_gather),
        make_lane(device, config.overlap_grad_reduce),
    )
    open_channels(config.symmetric_memory, maker.trained(), ranks.dense, pool, lanes[1])
    if initialisation is not None:
        maker.initialise(initialisation)
    units = iter(maker.make())
    ancestors = _ancestors(plans)
    groups = [
        UnitGroup(
            place,
            plan.name,
            [next(units) for _ in plan.units],
            _reshards(plan, config),
            plan.is_root,
            ancestors=ancestors[place],
        )
        for place, plan in enumerate(plans)
    ]
    pool.trim()
    pool.streams = LaneStreams(lanes) if any(lane.streams for lane in lanes) else None
    runtime = Runtime(groups, ranks, pool, lanes, config.runtime)
    if config.policy.nonfinite_grads != "keep":
        for unit in runtime.units:
            unit.reduction.note_own_gradients()
    let_rnns_be(module)
    _watch_data(module, plans, groups)
    _share_buffers(module, ranks)
    tree = TreeWatch(module, runtime.units)
    for plan, group in zip(plans, groups, strict=True):
        casts = config.policy.cast_forward_inputs
        input_dtype = config.policy.param_dtype if casts else None
        install_hooks(plan.module, Entry(group, runtime, tree, input_dtype))
    install_root_hooks(module, runtime, output_dtype=config.policy.output_dtype)
    for submodule in module.modules():
        submodule.register_load_state_dict_pre_hook(refuse_assignment)
        submodule.register_load_state_dict_pre_hook(_take_own_parts)
    teach_torch()
    return runtime


def refuse_assignment(
    _module: nn.Module, _state: object, _prefix: str, metadata: dict[str, object], *_: object
) -> None:
    """Refuse `load_state_dict(assign=True)` before it loads anything."""
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "load_state_dict: expected assign=False for a sharded module, got True, which would "
            "put other tensors in the place of its sharded parameters; leave assign out, and the "
            "values are copied into them"
        )


@torch.no_grad()
def _take_own_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Cut what is sharded otherwise, by us or as a DTensor, to this rank's part (a collective)."""
    for name, param in module._parameters.items():
        key = prefix + name
        if hasattr(state.get(key), "full_tensor"):
            state[key] = part_like(param, state[key])


def _ancestors(plans: list[GroupPlan]) -> list[frozenset[int]]:
    """For every plan the positions of those whose modules contain its own, under whatever name."""
    inside = [{id(module) for module in plan.module.modules()} for plan in plans]
    return [
        frozenset(
            place
            for place, (other, modules) in enumerate(zip(plans, inside, strict=True))
            if other is not plan and id(plan.module) in modules
        )
        for plan in plans
    ]


def _reshards(plan: GroupPlan, config: ShardConfig) -> bool:
    if config.strategy.shard.params is not Placement.SHARD:
        return False
    return (
        not plan.is_root if config.reshard_after_forward is None else config.reshard_after_forward
    )


class _UnitMaker:
    """Makes the units of `plans` and gives them rank 0's values, one tensor at a time."""

    def __init__(
        self,
        plans: Sequence[GroupPlan],
        ranks: ModelRanks,
        pool: BufferPool,
        config: ShardConfig,
    ) -> None:
        self._members = [(plan, members) for plan in plans for members in plan.units]
        self._ranks, self._pool = ranks, pool
        self._model_group = ranks.together.groups.group if ranks.experts_differ else None
        self._specs = [
            _unit_spec(number, *of_unit, ranks, config)
            for number, of_unit in enumerate(self._members)
        ]
        self._units: dict[int, Unit] = {}
        self._filled: set[ParamEntry] = set()

    def trained(self) -> list[UnitSpec]:
        """Those of units with gradients."""
        return [
            spec
            for spec, (_, members) in zip(self._specs, self._members, strict=True)
            if any(entry.param.requires_grad for entry in members)
        ]

    def initialise(self, initialisation: Initialisation) -> None:
        """Fill what is on the meta device. Nothing has been changed if that raises."""
        places = {
            id(entry.param): (number, index)
            for number, (_, members) in enumerate(self._members)
            for index, entry in enumerate(members)
        }
        for param, whole in initialisation.values():
            self._fill(*places[id(param)], whole)
        initialisation.finish(self._ranks.together)

    def make(self) -> list[Unit]:
        """Fill what has values already, and attach all units."""
        waiting = (
            entry.param
            for _, members in self._members
            for entry in members
            # Rank 0 sends what it has.
            if entry not in self._filled and self._ranks.of(expert=entry.is_expert).rank
        )
        nbytes = max((Staging.nbytes_for([param]) for param in waiting), default=0)
        staging = Staging(nbytes, self._pool.device)
        for number, (_, members) in enumerate(self._members):
            for index, entry in enumerate(members):
                if entry not in self._filled:
                    staging.restart()
                    self._fill(number, index, self._from_rank_0(entry, staging))
            _attach(self._unit(number), members)
        return [self._units[number] for number in range(len(self._members))]

    def _unit(self, number: int) -> Unit:
        if number not in self._units:
            collectives = self._ranks.of(expert=self._members[number][1][0].is_expert)
            self._units[number] = Unit(
                self._specs[number], collectives, self._pool, self._model_group
            )
        return self._units[number]

    def _from_rank_0(self, entry: ParamEntry, staging: Staging) -> Tensor:
        """The parameter on the device in one piece; on other ranks memory for it."""
        if self._ranks.of(expert=entry.is_expert).rank:
            return staging.take(entry.param)
        return entry.param.detach().to(self._pool.device)

    def _fill(self, number: int, index: int, whole: Tensor) -> None:
        """Give rank 0's `whole` of tensor `index` to a unit; elsewhere `whole` is overwritten."""
        whole = whole.contiguous()
        unit, entry = self._unit(number), self._members[number][1][index]
        if whole.numel():
            # As bytes: gloo refuses some dtypes.
            flat = whole.view(-1).view(torch.uint8)
            what = f"broadcast of the initial values of parameter '{entry.name}'"
            unit.collectives.broadcast(flat, what)
        unit.buffers.fill(index, whole)
        self._filled.add(entry)


def _unit_spec(
    index: int,
    plan: GroupPlan,
    members: list[ParamEntry],
    ranks: ModelRanks,
    config: ShardConfig,
) -> UnitSpec:
    first, is_expert = members[0].param, members[0].is_expert
    collectives = ranks.of(expert=is_expert)
    dtypes = resolve_dtypes(config.policy, first.dtype, trainable=first.requires_grad)
    num_axes = len(collectives.channels)
    chosen = members[0].wires
    wires = resolve_wires(config.policy, chosen, dtypes.compute, native=config.native)
    param_wire = resolve_param_wire(chosen, dtypes.compute)
    aligns = [wire.align_numel for wire in wires]
    if param_wire is not None:
        aligns.append(align_of(param_wire))
    return UnitSpec(
        index=index,
        name=plan.unit_name(members),
        names=tuple(entry.name for entry in members),
        layout=flat_layout(
            [entry.param.shape for entry in members],
            collectives.world_size,
            align_numel=math.lcm(*aligns),
            whole_numel=config.sizes.whole_numel,
        ),
        first_indices=tuple(entry.first_index for entry in members),
        dtypes=dtypes,
        placements=unit_placements(config.strategy, config.outer, num_axes),
        wires=wires,
        param_wire=param_wire,
        # Of an expert's too: tokens come to it from all data-parallel ranks.
        scale=1.0 / (config.divide_factor or ranks.dense.world_size),
        is_expert=is_expert and ranks.experts_differ,
    )


def _attach(unit: Unit, members: list[ParamEntry]) -> None:
    """Put the parameters of `unit` into the modules in the place of the plain ones."""
    slots = tuple(
        ParamSlot(parameters, attribute, index)
        for index, entry in enumerate(members)
        for parameters, attribute in (
            *((place._parameters, attribute) for place, attribute in entry.places),
            *entry.caches,
        )
    )
    trainable = [entry.param.requires_grad for entry in members]
    unit.attach(trainable, slots)
    for entry, sharded, full in zip(members, unit.faces.sharded, unit.faces.full, strict=True):
        # Marks that people leave on parameters, such as `no_decay`, stay readable.
        for name, value in vars(entry.param).items():
            vars(sharded).setdefault(name, value)
            vars(full).setdefault(name, value)
        replaced_params.note(entry.param, entry.name)
        entry.param = sharded


def _watch_data(module: nn.Module, plans: list[GroupPlan], groups: list[UnitGroup]) -> None:
    """Have values compared in units whose full parameters are seen by code that uses `.data`."""
    users = {id(user): {id(p) for p in user.modules()} for user in modules_that_use_data(module)}
    for plan, group in zip(plans, groups, strict=True):
        inside = {id(part) for part in plan.module.modules()}
        for unit, members in zip(group.units, plan.units, strict=True):
            places = {id(place) for entry in members for place, _ in entry.places}
            unit.faces.writes_data = any(
                user in inside and parts & places for user, parts in users.items()
            )


def _share_buffers(module: nn.Module, ranks: ModelRanks) -> None:
    """Bring buffers, and parameters that are not sharded, to the device and to rank 0's values.

    What is an expert's is so by its mark, or as a buffer of a module with no parameters but those
    of experts.
    """
    device = ranks.dense.groups.device
    of_experts = {
        id(part)
        for submodule in (module.modules() if ranks.experts is not ranks.dense else ())
        if (params := [*submodule.parameters()]) and all(map(is_expert, params))
        for part in submodule.modules()
    }
    moved: dict[int, Tensor] = {}  # a buffer of several modules stays one
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                collectives = ranks.of(expert=is_expert(buffer) or id(submodule) in of_experts)
                moved[id(buffer)] = _first_ranks(buffer.to(device), f"buffer '{name}'", collectives)
            submodule._buffers[name] = moved[id(buffer)]
    for name, param in module.named_parameters():
        if not isinstance(param, ShardedTensor):
            collectives = ranks.of(expert=is_expert(param))
            param.data = _first_ranks(param.data.to(device), f"parameter '{name}'", collectives)


def _first_ranks(tensor: Tensor, what: str, collectives: Collectives) -> Tensor:
    """`tensor` with rank 0's values, of any dtype, strides and layout."""
    if tensor.layout is not torch.strided:
        return collectives.gather_objects(tensor)[0].to(tensor.device)
    once = once_in_memory(tensor)
    whole = once.contiguous()
    if whole.numel():
        # Bytes in one piece: gloo refuses some dtypes, and leaves memory with gaps as it was.
        collectives.broadcast(whole.view(-1).view(torch.uint8), f"broadcast of {what}")
        once.copy_(whole)
    return tensor
