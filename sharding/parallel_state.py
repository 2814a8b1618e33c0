"""Megatron-Core's getters over one collection of process groups, for code that wants globals.

    from sidestream.sharding import parallel_state
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    parallel_state.get_tensor_model_parallel_group()

The one place of the package that keeps state of its own: which collection. All else takes a
`ProcessGroupCollection`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from .arguments import require_kind
from .model_parallel_layout import GROUP_KINDS
from .process_groups import ProcessGroupCollection
from .process_groups import initialize_model_parallel as make_process_groups

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _State:
    groups: ProcessGroupCollection | None = None


_state = _State()


def set_process_groups(process_groups: ProcessGroupCollection) -> None:
    """Have the getters give `process_groups`, which `destroy_model_parallel` then ends.

    Raises:
        RuntimeError: there are some already.
        TypeError: they are no collection.
    """
    _require_none()
    require_kind("process_groups", process_groups, ProcessGroupCollection)
    _state.groups = process_groups


def _setting(make: Callable[P, ProcessGroupCollection]) -> Callable[P, ProcessGroupCollection]:
    @functools.wraps(make, assigned=())
    def initialize(*sizes: P.args, **options: P.kwargs) -> ProcessGroupCollection:
        """Make the groups that `process_groups.initialize_model_parallel` makes, and have the
        getters give them.

        Raises:
            RuntimeError: there are some already.
            TypeError, ValueError, CommunicationError: as that function does.
        """
        _require_none()
        set_process_groups(made := make(*sizes, **options))
        return made

    return initialize


initialize_model_parallel = _setting(make_process_groups)


def destroy_model_parallel() -> None:
    """End the groups and forget them; does nothing without any."""
    if _state.groups is not None:
        _state.groups.destroy()
    _state.groups = None


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


_DATA = {
    "": "dp",
    "with_context_parallel": "dp_cp",
    "partial_data_parallel with_context_parallel": "intra_dp_cp",
}
_EXPERT_DATA = {"": "expt_dp", "partial_expert_data_parallel": "intra_expt_dp"}
_TENSOR_DATA = {"": "tp_dp", "with_context_parallel": "tp_dp_cp"}
"""Groups by the options that are True, in the order of the alphabet."""


def _getter(
    found: Callable[[dist.ProcessGroup], T], which: str | Mapping[str, str]
) -> Callable[..., T]:
    """Gives what is `found` of a group: that called `which`, or that which has the options given,
    all by name.
    """
    names = {"": which} if isinstance(which, str) else which
    known = {option for given in names for option in given.split()}

    def get(**options: bool) -> T:
        given = " ".join(sorted(name for name in options if options[name]))
        if given not in names or not known.issuperset(options):
            raise TypeError(
                f"options: expected none or all of one of {[*names][1:]} to be True, got {options}"
                "; pass those"
            )
        return found(getattr(get_process_groups(), names[given]))

    meanings = "; ".join(f"{name}: {GROUP_KINDS[name].meaning}" for name in names.values())
    get.__doc__ = f"{found.__doc__} Of {meanings}."
    return get


def _group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group."""
    return group


def _size(group: dist.ProcessGroup) -> int:
    """How many ranks are in the group."""
    return dist.get_world_size(group)


def _rank(group: dist.ProcessGroup) -> int:
    """This rank's number in the group."""
    return dist.get_rank(group)


def _first(group: dist.ProcessGroup) -> int:
    """The number in the job of the first rank of the group."""
    return dist.get_process_group_ranks(group)[0]


def _last(group: dist.ProcessGroup) -> int:
    """The number in the job of the last rank of the group."""
    return dist.get_process_group_ranks(group)[-1]


def _next(group: dist.ProcessGroup, distance: int = 1) -> int:
    """The number in the job of the rank after this one in the group, round and round."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[(dist.get_rank(group) + distance) % len(ranks)]


def _previous(group: dist.ProcessGroup) -> int:
    """The number in the job of the rank before this one in the group, round and round."""
    return _next(group, -1)


get_model_parallel_group = _getter(_group, "mp")
get_model_parallel_src_rank = _getter(_first, "mp")
get_tensor_model_parallel_group = _getter(_group, "tp")
get_tensor_model_parallel_world_size = _getter(_size, "tp")
get_tensor_model_parallel_rank = _getter(_rank, "tp")
get_tensor_model_parallel_src_rank = _getter(_first, "tp")
get_pipeline_model_parallel_group = _getter(_group, "pp")
get_pipeline_model_parallel_world_size = _getter(_size, "pp")
get_pipeline_model_parallel_rank = _getter(_rank, "pp")
get_pipeline_model_parallel_first_rank = _getter(_first, "pp")
get_pipeline_model_parallel_last_rank = _getter(_last, "pp")
get_pipeline_model_parallel_next_rank = _getter(_next, "pp")
get_pipeline_model_parallel_prev_rank = _getter(_previous, "pp")
get_embedding_group = _getter(_group, "embd")
get_position_embedding_group = _getter(_group, "pos_embd")
get_data_parallel_group = _getter(_group, _DATA)
get_data_parallel_world_size = _getter(_size, _DATA)
get_data_parallel_rank = _getter(_rank, _DATA)
get_data_parallel_src_rank = _getter(_first, _DATA)
get_context_parallel_group = _getter(_group, "cp")
get_context_parallel_world_size = _getter(_size, "cp")
get_context_parallel_rank = _getter(_rank, "cp")
get_tensor_and_context_parallel_group = _getter(_group, "tp_cp")
get_tensor_and_context_parallel_world_size = _getter(_size, "tp_cp")
get_tensor_and_context_parallel_rank = _getter(_rank, "tp_cp")
get_tensor_and_data_parallel_group = _getter(_group, _TENSOR_DATA)
get_expert_model_parallel_group = _getter(_group, "ep")
get_expert_model_parallel_world_size = _getter(_size, "ep")
get_expert_model_parallel_rank = _getter(_rank, "ep")
get_expert_tensor_parallel_group = _getter(_group, "expt_tp")
get_expert_tensor_parallel_world_size = _getter(_size, "expt_tp")
get_expert_tensor_parallel_rank = _getter(_rank, "expt_tp")
get_expert_tensor_and_model_parallel_group = _getter(_group, "tp_ep")
get_expert_tensor_and_model_parallel_world_size = _getter(_size, "tp_ep")
get_expert_tensor_and_model_parallel_rank = _getter(_rank, "tp_ep")
get_expert_tensor_model_pipeline_parallel_group = _getter(_group, "tp_ep_pp")
get_expert_data_parallel_group = _getter(_group, _EXPERT_DATA)
get_expert_data_parallel_world_size = _getter(_size, _EXPERT_DATA)
get_expert_data_parallel_rank = _getter(_rank, _EXPERT_DATA)
get_inter_distributed_optimizer_instance_group = _getter(_group, "inter_dist_opt")
get_intra_distributed_optimizer_instance_group = _getter(_group, "intra_dist_opt")


def is_pipeline_first_stage() -> bool:
    """Whether this rank is a first stage; parts of a virtual pipeline are its schedule's matter."""
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank is a last stage."""
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def is_rank_in_embedding_group() -> bool:
    """Whether this rank has word embeddings."""
    return get_process_groups().get("embd") is not None


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank has position embeddings."""
    return get_process_groups().get("pos_embd") is not None
