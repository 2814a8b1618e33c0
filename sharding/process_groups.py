"""The process groups of a model-parallel job, in one object that is passed around."""

from __future__ import annotations

import datetime
import math
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arguments import kind_of, require_count, require_number
from .communicators import end_communicators, gather_objects, new_communicator, require_alike
from .data_parallel_groups import device_of, group_over
from .mesh_axes import SHARD_AXIS
from .model_parallel_layout import GROUP_KINDS, ModelParallelLayout, Ranks, group_kind
from .nccl_options import Options, nccl_options, torch_options
from .rank_grid import mesh_of, place_among

OUTER_AXIS = "dp_outer"
"""Across optimizer instances, as a dimension of `ProcessGroupCollection.data_parallel_mesh`."""


class ProcessGroupCollection:
    """Process groups around this rank by the names that Megatron-Core gives them; `GROUP_KINDS`
    says what each is for. Never changed after it was made.

        groups = initialize_model_parallel(tensor_model_parallel_size=2)
        fully_shard(model, device_mesh=groups.data_parallel_mesh())
        ProcessGroupCollection(**{**groups.groups, "tp": another})

    Each is a `torch.distributed.ProcessGroup` or unset; None counts as unset. To read one that is
    unset raises AttributeError, which says how to make it; `get` gives None.

    Raises:
        TypeError: a value is no process group.
        ValueError: unknown name.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    mp: dist.ProcessGroup
    embd: dist.ProcessGroup
    pos_embd: dist.ProcessGroup
    cp: dist.ProcessGroup
    tp_cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expt_tp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup
    tp_ep_pp: dist.ProcessGroup
    tp_dp: dist.ProcessGroup
    tp_dp_cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    expt_dp: dist.ProcessGroup
    intra_dp_cp: dist.ProcessGroup
    intra_expt_dp: dist.ProcessGroup
    inter_dist_opt: dist.ProcessGroup
    intra_dist_opt: dist.ProcessGroup

    def __init__(self, **groups: dist.ProcessGroup | None):
        for name, group in groups.items():
            group_kind(name)
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(
                    f"{name}: expected a torch.distributed.ProcessGroup or None, got "
                    f"{kind_of(group)}; pass the group itself, such as mesh.get_group('{name}')"
                )
        self.__dict__.update({name: group for name, group in groups.items() if group is not None})

    @property
    def groups(self) -> Mapping[str, dist.ProcessGroup]:
        """Those that are set, by name."""
        return types.MappingProxyType(self.__dict__)

    def get(self, name: str) -> dist.ProcessGroup | None:
        """The group called `name`, None where it is unset.

        Raises:
            ValueError: no group has that name.
        """
        group_kind(name)
        return self.groups.get(name)

    if not TYPE_CHECKING:  # which knows the names above

        def __getattr__(self, name: str) -> NoReturn:
            if name not in GROUP_KINDS:
                raise AttributeError(f"ProcessGroupCollection has no attribute {name!r}")
            raise AttributeError(
                f"{name}: expected a process group ({GROUP_KINDS[name].meaning}), got none on this "
                f"rank; have initialize_model_parallel make it, or pass {name}=... to "
                "ProcessGroupCollection"
            )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{name}: a ProcessGroupCollection never changes; make another one with "
            f"ProcessGroupCollection(**{{**collection.groups, '{name}': ...}})"
        )

    def __repr__(self) -> str:
        texts = [f"{name}={dist.get_process_group_ranks(g)}" for name, g in self.groups.items()]
        return f"ProcessGroupCollection({', '.join(texts)})"

    def data_parallel_mesh(
        self, *, expert: bool = False, device_type: str | None = None
    ) -> DeviceMesh:
        """What `fully_shard` takes as `device_mesh`: the ranks of `dp_cp`, or of `expt_dp` for
        experts, with the groups of this collection.

        Its dimension is "dp_shard" (`SHARD_AXIS`). With several optimizer instances that is inside
        one (`intra_dp_cp`, `intra_expt_dp`), and "dp_outer" (`OUTER_AXIS`) across them
        (`inter_dist_opt`) comes before it. device_type: None for the one of the backend.

        Raises:
            AttributeError: a group that is needed is unset.
            ValueError: the groups are no grid.
        """
        whole = self.expt_dp if expert else self.dp_cp
        across = self.get("inter_dist_opt")
        device_type = device_type or device_of(whole).type
        ranks = dist.get_process_group_ranks(whole)
        if across is None:
            return mesh_of(ranks, (len(ranks),), (SHARD_AXIS,), (whole,), device_type)
        inside = self.intra_expt_dp if expert else self.intra_dp_cp
        column, row = map(dist.get_process_group_ranks, (across, inside))
        count = len(row)
        rows = [ranks[start : start + count] for start in range(0, len(ranks), count)]
        columns = [ranks[place::count] for place in range(count)]
        if row not in rows or column not in columns or len(ranks) != len(column) * count:
            raise ValueError(
                f"inter_dist_opt: expected one rank of each stretch of {count} of {ranks}, as "
                f"{row} is one, got {column}; make the groups with initialize_model_parallel"
            )
        names = OUTER_AXIS, SHARD_AXIS
        return mesh_of(ranks, (len(column), count), names, (across, inside), device_type)

    def destroy(self) -> None:
        """End all groups but the job's own, those that were passed in too; nobody may use them
        later.
        """
        end_communicators(self.groups.values())


def require_groups(process_groups: object) -> None:
    """Refuse what is neither None nor a collection.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(process_groups, ProcessGroupCollection | None):
        raise TypeError(
            "process_groups: expected a ProcessGroupCollection or None, got "
            f"{kind_of(process_groups)}; pass what initialize_model_parallel returns"
        )


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    rank_offset: int = 0,
    local_world_size: int | None = None,
    distributed_timeout_minutes: float | None = None,
    nccl_communicator_config_path: str | Path | Mapping[str, Options] | None = None,
    groups: Iterable[str] = tuple(GROUP_KINDS),
) -> ProcessGroupCollection:
    """Make the groups around this rank (a collective of the job's ranks from `rank_offset` on,
    `local_world_size` of them or all that follow). Those of the same ranks and options are one.

    Sizes and `order` are those of `ModelParallelLayout`. Nothing global is kept: any number of
    collections may be made, over the same ranks too.

    distributed_timeout_minutes: time limit of collectives, None for the job's own.
    nccl_communicator_config_path: options of NCCL by group, as `nccl_options` takes them. groups:
    names of those to make.

    Raises:
        TypeError, ValueError: wrong sizes, order, names or options, no process group, a rank that
            is not among those of the layout, ranks that were given different arguments.
        CommunicationError: a rank is gone.
    """
    require_count("rank_offset", rank_offset, 0)
    left = dist.get_world_size() - rank_offset if dist.is_initialized() else 1
    if left < 1:
        place_among(range(rank_offset, rank_offset + 1))
    if local_world_size is not None:
        require_count("local_world_size", local_world_size)
    layout = ModelParallelLayout(
        world_size=local_world_size or left,
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        order=order,
        rank_offset=rank_offset,
    )
    asked = {name: group_kind(name) for name in groups}
    wanted = [name for name in GROUP_KINDS if name in asked]
    timeout = _timeout(distributed_timeout_minutes)
    options = nccl_options(nccl_communicator_config_path)
    ranks = layout.dense.ranks
    rank, job = place_among(ranks)
    of_torch = {name: torch_options(options[name], dist.get_backend(job)) for name in options}
    arguments = {"sizes": layout, "groups": wanted, "time limit": timeout, "options": options}
    _require_agreement(ranks, job, arguments)
    made: dict[tuple[Ranks | None, str], dist.ProcessGroup] = {}
    found: dict[str, dist.ProcessGroup | None] = {}
    for name in wanted:
        key = members, _ = layout.group_of(name, rank), str(options.get(name))
        if members is not None and key not in made:
            made[key] = new_communicator(
                name, members, job, timeout=timeout, options=of_torch.get(name)
            )
        found[name] = made.get(key)
    return ProcessGroupCollection(**found)


def _timeout(minutes: float | None) -> datetime.timedelta | None:
    if minutes is None:
        return None
    expected = "None or a positive number of minutes"
    require_number("distributed_timeout_minutes", minutes, expected, lambda n: 0 < n < math.inf)
    return datetime.timedelta(minutes=minutes)


def _require_agreement(
    ranks: range, job: dist.ProcessGroup, arguments: Mapping[str, object]
) -> None:
    """Refuse arguments that differ between ranks, some of which would wait for ever.

    Raises:
        ValueError: they differ; on every rank.
        CommunicationError: a rank is gone, or was given other ranks.
    """
    mine = [f"{name} {value}" for name, value in arguments.items()]
    what = f"meeting of ranks {ranks.start} to {ranks.stop - 1} to make groups"
    everyone = gather_objects(mine, group_over(tuple(ranks), (job,)), device_of(job), what)
    require_alike(
        dict(zip(ranks, everyone, strict=True)),
        "initialize_model_parallel: expected the same arguments",
        "pass the same everywhere",
    )
