"""Experts: parameters that other ranks have other ones of, beside those that all ranks share.

    rank of the job       0  1  2  3
    dense parameters      .  .  .  .      the same on ranks 0 to 3: the data-parallel ranks
    experts               a  b  a  b      a on the expert ranks 0 and 2, b on 1 and 3

An expert's gradient is summed, and at ZeRO-1 and above sharded, over the ranks that hold the same
expert. It is divided by how many data-parallel ranks there are all the same, since tokens came to
it from all of them.

One of both sets of ranks contains the other: what is refused otherwise. So all ranks that any group
joins, directly or by others, are those of the larger set. They make every agreement together: on
the model's structure, the order of exchanges, gathers, whether a step is made. So each starts its
collectives, of whichever group, in one order that all of them have, and the oldest that has not
ended is always one which all its ranks have begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .arguments import require_kind
from .collectives import Channel, Collectives
from .data_parallel_groups import DataParallelGroups, data_parallel_groups
from .messages import listed

if TYPE_CHECKING:
    from .modules.partition import ParamEntry
    from .shard_config import ShardConfig


def is_expert(tensor: Tensor) -> bool:
    """Whether it is marked as an expert's, in Megatron's way: its attribute `allreduce` counts as
    false. Nothing else says so.
    """
    return not getattr(tensor, "allreduce", True)


@dataclass(frozen=True, slots=True)
class ModelRanks:
    """The ranks of one model's parameters. `experts`: of those that are marked as experts'; `dense`
    itself where there are none, or no mesh for them.
    """

    dense: Collectives
    experts: Collectives

    def of(self, *, expert: bool) -> Collectives:
        """Those over which an expert's parameters lie, or all others."""
        return self.experts if expert else self.dense

    @property
    def together(self) -> Collectives:
        """All ranks that take part in agreements: the larger set."""
        return max(self.dense, self.experts, key=lambda one: one.world_size)

    @property
    def experts_differ(self) -> bool:
        """Whether not all of these ranks hold the same experts and the same dense parameters."""
        return self.experts.world_size != self.dense.world_size

    @property
    def channels(self) -> list[Channel]:
        """Along every axis of either."""
        both = [self.dense] if self.experts is self.dense else [self.dense, self.experts]
        return [channel for one in both for channel in one.channels]

    def described(self) -> dict[str, str]:
        """The sizes of axes, to compare: who has others would take part in other collectives."""
        sizes = f"{self.dense.grid.sizes} beside {self.experts.grid.sizes}"
        return {} if self.experts is self.dense else {"expt_device_mesh": sizes}

    def require_one_value(self, argument: str) -> None:
        """Refuse to save or load a model by the names of its parameters.

        Raises:
            ValueError: ranks have different experts under one name.
        """
        if self.experts_differ:
            raise ValueError(
                f"{argument}: expected parameters with one value on all ranks, got experts "
                "(expt_device_mesh), of which ranks have different ones under one name; save "
                "module.state_dict() with full_tensor() of each value, and load it with "
                "module.load_state_dict(), on each rank by itself"
            )


def model_ranks(
    mesh: DeviceMesh | None,
    shard_dim: str | None,
    outer_dim: str | None = None,
    expert_mesh: DeviceMesh | None = None,
    *,
    ranks_per_node: int | None = None,
    devices: Iterable[torch.device] = (),
) -> ModelRanks:
    """Those over `shard_dim` and `outer_dim` of `mesh`, as `data_parallel_groups` says, and for
    experts over the dimensions of `expert_mesh` that are called so, or its only one (a collective).

    Raises:
        TypeError: `expert_mesh` is no mesh.
        ValueError: wrong dimensions, devices or ranks_per_node; an `expert_mesh` on some ranks
            alone; neither set of ranks contains the other.
        CommunicationError: a rank is gone, or was given other ranks.
        RuntimeError: more ranks than GPUs on this machine.
    """
    devices = tuple(devices)
    told = "" if expert_mesh is None else ", with an expt_device_mesh"
    groups = data_parallel_groups(
        mesh, shard_dim, outer_dim, ranks_per_node=ranks_per_node, devices=devices, told=told
    )
    dense = Collectives(groups)
    if expert_mesh is None:
        return ModelRanks(dense, dense)
    require_kind("expt_device_mesh", expert_mesh, DeviceMesh)
    try:
        groups = data_parallel_groups(
            expert_mesh,
            None if expert_mesh.ndim == 1 else shard_dim,
            outer_dim,
            # How many of an expert's ranks a node has is another number.
            ranks_per_node=1 if ranks_per_node == 1 else None,
            devices=devices,
        )
    except ValueError as error:
        raise ValueError(f"expt_device_mesh: {error}") from error
    named = tuple(replace(axis, name=f"expert {axis.name}") for axis in groups.axes)
    experts = Collectives(replace(groups, axes=named), beside=dense)
    _require_nested(dense, experts)
    return ModelRanks(dense, experts)


def _ranks_in(groups: DataParallelGroups) -> Sequence[int]:
    return (0,) if groups.group is None else dist.get_process_group_ranks(groups.group)


def _require_nested(dense: Collectives, experts: Collectives) -> None:
    """Have all ranks that would agree on something find that they are the same (a collective).

    Raises:
        ValueError: some data-parallel ranks contain their expert ranks, or are contained in them,
            and others are not; on all ranks that share a group with one of those.
    """
    own, others = set(_ranks_in(dense.groups)), _ranks_in(experts.groups)
    told = [set(theirs) for theirs in dense.gather_objects(tuple(others))]
    is_nested = all(theirs <= own for theirs in told) or all(own <= theirs for theirs in told)
    if not all(experts.gather_objects(is_nested)):
        raise ValueError(
            "expt_device_mesh: expected expert ranks that are all among the data-parallel ranks, "
            f"or have all of these among them, got ranks {listed([*map(str, others)])} with "
            f"experts of ranks {listed([*map(str, sorted(own))])} here or elsewhere; choose sizes "
            "of which one divides the other"
        )


def check_experts(ranks: ModelRanks, entries: Iterable[ParamEntry], config: ShardConfig) -> None:
    """Whether `entries`, which are alike on all ranks, go with `ranks` and the options.

    Raises:
        ValueError: experts without ranks of their own, or these without experts, or with symmetric
            memory.
    """
    names = [entry.name for entry in entries if entry.is_expert]
    has_mesh = ranks.experts is not ranks.dense
    if has_mesh and not names:
        raise ValueError(
            "expt_device_mesh: expected parameters that are marked as an expert's "
            "(param.allreduce = False), got none; mark them (copy.deepcopy drops marks), or leave "
            "the mesh out"
        )
    if names and not has_mesh and ranks.dense.world_size > 1:
        raise ValueError(
            "expt_device_mesh: expected the mesh of the ranks that hold the same experts, as the "
            "process_groups of DistributedDataParallel have it, since these are marked so "
            f"(allreduce=False): {listed(names)}; pass it, or remove the mark where all ranks hold "
            "the same"
        )
    if has_mesh and config.symmetric_memory != "off":
        raise ValueError(
            "symmetric_memory: expected 'off' with experts over ranks of their own, got "
            f"'{config.symmetric_memory}'; leave it out"
        )
