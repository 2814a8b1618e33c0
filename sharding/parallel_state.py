"""Megatron-Core's getters over one collection of process groups, for code that wants globals.

    from sidestream.sharding import parallel_state
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    parallel_state.get_tensor_model_parallel_group()

The one place of the package that keeps state of its own: which collection, and which part of a
virtual pipeline is running. All else takes a `ProcessGroupCollection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from . import process_groups
from .arguments import kind_of
from .process_groups import ProcessGroupCollection

_Which = str | Callable[..., str]


@dataclass(slots=True)
class _State:
    groups: ProcessGroupCollection | None = None
    are_own: bool = False
    virtual_size: int | None = None
    virtual_rank: int | None = None


_state = _State()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    **options: Any,
) -> ProcessGroupCollection:
    """Make the groups that `process_groups.initialize_model_parallel` makes, and have the getters
    give them.

    Raises:
        RuntimeError: there are some already.
        TypeError, ValueError, CommunicationError: as that function does.
    """
    _require_none()
    virtual = virtual_pipeline_model_parallel_size
    groups = process_groups.initialize_model_parallel(
        tensor_model_parallel_size, pipeline_model_parallel_size, virtual, **options
    )
    set_process_groups(groups, virtual)
    _state.are_own = True
    return groups


def set_process_groups(
    groups: ProcessGroupCollection, virtual_pipeline_model_parallel_size: int | None = None
) -> None:
    """Have the getters give `groups`, which stay their owner's.

    Raises:
        RuntimeError: there are some already.
        TypeError: they are no collection.
    """
    _require_none()
    if not isinstance(groups, ProcessGroupCollection):
        raise TypeError(
            f"groups: expected a ProcessGroupCollection, got {kind_of(groups)}; pass what "
            "process_groups.initialize_model_parallel returns"
        )
    _state.groups, _state.are_own = groups, False
    _state.virtual_size = virtual_pipeline_model_parallel_size
    _state.virtual_rank = None if _state.virtual_size is None else 0


def destroy_model_parallel() -> None:
    """Forget the groups, and end them where `initialize_model_parallel` of this module made them;
    does nothing without any.
    """
    groups, are_own = _state.groups, _state.are_own
    _state.groups, _state.are_own = None, False
    _state.virtual_size = _state.virtual_rank = None
    if groups is not None and are_own:
        groups.destroy()


def is_initialized() -> bool:
    """Whether there are groups."""
    return _state.groups is not None


model_parallel_is_initialized = is_initialized


def get_process_groups() -> ProcessGroupCollection:
    """The collection behind the getters.

    Raises:
        RuntimeError: there is none.
    """
    if _state.groups is None:
        raise RuntimeError(
            "parallel_state: expected process groups, got none; call "
            "parallel_state.initialize_model_parallel first, or pass a ProcessGroupCollection "
            "instead of using globals"
        )
    return _state.groups


def _require_none() -> None:
    if _state.groups is not None:
        raise RuntimeError(
            f"parallel_state: expected none yet, got {_state.groups}; call "
            "destroy_model_parallel first, or keep the second world in a collection of its own "
            "(process_groups.initialize_model_parallel)"
        )


def _data_parallel(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> str:
    if partial_data_parallel and not with_context_parallel:
        raise ValueError(
            "partial_data_parallel: expected with_context_parallel=True, got False; pass it, since "
            "optimizer instances are parts of dp_cp"
        )
    if partial_data_parallel:
        return "intra_dp_cp"
    return "dp_cp" if with_context_parallel else "dp"


def _expert_data_parallel(partial_expert_data_parallel: bool = False) -> str:
    return "intra_expt_dp" if partial_expert_data_parallel else "expt_dp"


def _tensor_and_data_parallel(with_context_parallel: bool = False) -> str:
    return "tp_dp_cp" if with_context_parallel else "tp_dp"


def _amax_reduction(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> str:
    if tp_only_amax_red:
        return "tp_cp" if with_context_parallel else "tp"
    return _tensor_and_data_parallel(with_context_parallel)


def _group(which: _Which) -> Callable[..., dist.ProcessGroup]:
    """Gives the group called `which`, or as that says by the getter's own arguments, all by name.
    With check_initialized=False, None where it is unset.
    """
    name_of = which if callable(which) else lambda: which

    def get(*, check_initialized: bool = True, **options: bool) -> Any:
        name = name_of(**options)
        if not check_initialized:
            return None if _state.groups is None else _state.groups.get(name)
        return getattr(get_process_groups(), name)

    return get


def _of(which: _Which, found: Callable[[dist.ProcessGroup], int]) -> Callable[..., int]:
    get = _group(which)
    # Without a group, torch would tell of all ranks of the job: check_initialized is always True.
    return lambda **options: found(get(**options, check_initialized=True))


def _size(which: _Which) -> Callable[..., int]:
    return _of(which, dist.get_world_size)


def _rank(which: _Which) -> Callable[..., int]:
    return _of(which, dist.get_rank)


def _member(which: _Which, place: int) -> Callable[..., int]:
    """Gives the number in the job of the rank at `place` in the group."""
    return _of(which, lambda group: dist.get_process_group_ranks(group)[place])


def _neighbour(which: _Which, distance: int) -> Callable[..., int]:
    """Gives the number in the job of the rank `distance` further on, round and round."""

    def found(group: dist.ProcessGroup) -> int:
        ranks = dist.get_process_group_ranks(group)
        return ranks[(dist.get_rank(group) + distance) % len(ranks)]

    return _of(which, found)


get_model_parallel_group = _group("mp")
get_model_parallel_src_rank = _member("mp", 0)
get_tensor_model_parallel_group = _group("tp")
get_tensor_model_parallel_world_size = _size("tp")
get_tensor_model_parallel_rank = _rank("tp")
get_tensor_model_parallel_src_rank = _member("tp", 0)
get_pipeline_model_parallel_group = _group("pp")
get_pipeline_model_parallel_world_size = _size("pp")
get_pipeline_model_parallel_rank = _rank("pp")
get_pipeline_model_parallel_first_rank = _member("pp", 0)
get_pipeline_model_parallel_last_rank = _member("pp", -1)
get_pipeline_model_parallel_next_rank = _neighbour("pp", 1)
get_pipeline_model_parallel_prev_rank = _neighbour("pp", -1)
get_embedding_group = _group("embd")
get_position_embedding_group = _group("pos_embd")
get_data_parallel_group = _group(_data_parallel)
get_data_parallel_world_size = _size(_data_parallel)
get_data_parallel_rank = _rank(_data_parallel)
get_data_parallel_src_rank = _member(_data_parallel, 0)
get_context_parallel_group = _group("cp")
get_context_parallel_world_size = _size("cp")
get_context_parallel_rank = _rank("cp")
get_tensor_and_context_parallel_group = _group("tp_cp")
get_tensor_and_context_parallel_world_size = _size("tp_cp")
get_tensor_and_context_parallel_rank = _rank("tp_cp")
get_tensor_and_data_parallel_group = _group(_tensor_and_data_parallel)
get_amax_reduction_group = _group(_amax_reduction)
get_expert_model_parallel_group = _group("ep")
get_expert_model_parallel_world_size = _size("ep")
get_expert_model_parallel_rank = _rank("ep")
get_expert_tensor_parallel_group = _group("expt_tp")
get_expert_tensor_parallel_world_size = _size("expt_tp")
get_expert_tensor_parallel_rank = _rank("expt_tp")
get_expert_tensor_and_model_parallel_group = _group("tp_ep")
get_expert_tensor_and_model_parallel_world_size = _size("tp_ep")
get_expert_tensor_and_model_parallel_rank = _rank("tp_ep")
get_expert_tensor_model_pipeline_parallel_group = _group("tp_ep_pp")
get_expert_data_parallel_group = _group(_expert_data_parallel)
get_expert_data_parallel_world_size = _size(_expert_data_parallel)
get_expert_data_parallel_rank = _rank(_expert_data_parallel)
get_inter_distributed_optimizer_instance_group = _group("inter_dist_opt")
get_intra_distributed_optimizer_instance_group = _group("intra_dist_opt")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """How many parts of the model a stage has; None without a virtual pipeline."""
    return _state.virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The part that is running; None without a virtual pipeline."""
    return _state.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int) -> None:
    """Say which part is running.

    Raises:
        ValueError: there is no such part.
    """
    if rank not in range(_state.virtual_size or 0):
        raise ValueError(
            f"rank: expected one below virtual_pipeline_model_parallel_size {_state.virtual_size}, "
            f"got {rank}; initialise with as many parts"
        )
    _state.virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank is a first stage, and unless ignore_virtual part `vp_stage` (None: the one
    that is running) its first.
    """
    part = _state.virtual_rank if vp_stage is None else vp_stage
    is_part = ignore_virtual or _state.virtual_size is None or part == 0
    return is_part and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank is a last stage, and unless ignore_virtual part `vp_stage` (None: the one
    that is running) its last.
    """
    size, part = _state.virtual_size, _state.virtual_rank if vp_stage is None else vp_stage
    is_part = ignore_virtual or size is None or part == size - 1
    last = get_pipeline_model_parallel_world_size() - 1
    return is_part and get_pipeline_model_parallel_rank() == last


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank has word embeddings, and unless ignore_virtual its part `vp_stage` does."""
    is_end = is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)
    is_member = get_embedding_group(check_initialized=False) is not None
    return is_member and (ignore_virtual or is_end)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank has position embeddings."""
    return get_position_embedding_group(check_initialized=False) is not None
