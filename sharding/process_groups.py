"""From a device mesh (or nothing) to the two communicators of a sharded model. The only caller of
new_group.
"""

from __future__ import annotations

import atexit
import os
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from .arguments import kind_of
from .errors import communicating

_Beside = weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]
_SECOND: _Beside = weakref.WeakKeyDictionary()
_BACKGROUND: _Beside = weakref.WeakKeyDictionary()
_HOSTS: _Beside = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the data-parallel ranks, this rank's place on it, and two communicators over the
    same ranks, so that gathers and reductions never queue behind each other.

    Both are None along an axis of one rank, which moves nothing.
    """

    name: str
    size: int
    rank: int
    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class DataParallelGroups:
    """All data-parallel ranks: `rank` of `world_size` in `group` (None: there is no process group),
    and where each of them is along `axes`. The shard axis comes first.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None
    axes: tuple[Axis, ...]
    coordinates: tuple[tuple[int, ...], ...]


def shorten_flight_record() -> None:
    """Keep torch's record of past collectives short in a process that communicates with gloo.

    Call it before the first process group; what the user set in the environment stays. The record
    (2000 operations by default) leaves small blocks between the tensors of the CPU's heap, whose
    gaps then go unused: ZeRO-3 on a small GPT grew by 310 MiB in 700 steps with glibc 2.36.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the variable's old name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")


def _default_device() -> torch.device:
    if torch.cuda.is_available() and not (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _device_of(mesh: DeviceMesh) -> torch.device:
    """What a mesh says stands, over gloo too, by which ranks can share a GPU."""
    if mesh.device_type == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _initialize_from_environment() -> bool:
    """Join the job that torchrun describes in the environment. False when there is none."""
    if dist.is_initialized():
        return True
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise RuntimeError(
                f"local rank {local_rank}: expected at most one rank per GPU and this machine has "
                f"{count}; start at most {count} ranks here, or hide the GPUs "
                "(CUDA_VISIBLE_DEVICES='') to run on CPU"
            )
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
    else:
        shorten_flight_record()
        dist.init_process_group("gloo")
    return True


def require_mesh(mesh: object, axis_name: object) -> None:
    """Refuse a mesh or a dimension's name of another type; None stands for both.

    Raises:
        TypeError: one is something else.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh: expected a DeviceMesh, got {kind_of(mesh)}; make one with "
            "torch.distributed.device_mesh.init_device_mesh, or leave it out to use all ranks"
        )
    if axis_name is not None and not isinstance(axis_name, str):
        raise TypeError(
            "dp_shard_dim: expected the name of one of the mesh's dimensions, got "
            f"{axis_name!r}; name the dimension when making the mesh (mesh_dim_names=...)"
        )


def _mesh_group(mesh: DeviceMesh, axis_name: str | None) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names
    if axis_name is not None and axis_name not in (names or ()):
        raise ValueError(
            f"dp_shard_dim: expected one of the mesh's dimension names {list(names or ())}, got "
            f"'{axis_name}'; name the dimension when making the mesh (mesh_dim_names=...) or pass "
            "one of these"
        )
    if axis_name is None and mesh.ndim != 1:
        raise ValueError(
            "dp_shard_dim: expected the name of the dimension to shard over, because device_mesh "
            f"has {mesh.ndim} dimensions {list(names or ())}; got None"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"device_mesh: expected a mesh of which this rank is part, got ranks "
            f"{mesh.mesh.flatten().tolist()} on rank {dist.get_rank()}; call fully_shard on those "
            "ranks alone"
        )
    return mesh.get_group(axis_name if axis_name is not None else 0)


def data_parallel_groups(mesh: DeviceMesh | None, axis_name: str | None) -> DataParallelGroups:
    """The groups to shard over: `axis_name` of `mesh`, its only dimension, or all ranks.

    Raises:
        ValueError: wrong or missing dimension name, a mesh without this rank.
        RuntimeError: more ranks than GPUs on this machine.
    """
    group: dist.ProcessGroup | None
    if mesh is not None:
        group = _mesh_group(mesh, axis_name)
    elif axis_name is not None:
        raise ValueError(
            f"dp_shard_dim: expected a device_mesh that has dimension '{axis_name}', got none"
        )
    elif _initialize_from_environment():
        group = dist.group.WORLD
    else:
        return DataParallelGroups(
            0, 1, _default_device(), None, (Axis("dp_shard", 1, 0, None, None),), ((0,),)
        )
    assert group is not None
    device = _default_device() if mesh is None else _device_of(mesh)
    ranks = dist.get_process_group_ranks(group)
    rank, size = dist.get_rank(group), len(ranks)
    moves = size > 1
    axis = Axis(
        axis_name or "dp_shard",
        size,
        rank,
        group if moves else None,
        _second_communicator(group, ranks) if moves else None,
    )
    coordinates = tuple((place,) for place in range(size))
    return DataParallelGroups(rank, size, device, group, (axis,), coordinates)


def background_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group over the ranks of `group` for a thread beside training; made once."""
    known = _BACKGROUND.get(group)
    if known is None:
        with communicating("meeting of all ranks before an asynchronous save"):
            _count_names_alike(group)
        ranks = dist.get_process_group_ranks(group)
        known = _BACKGROUND[group] = _beside(group, ranks, "gloo", "sidestream_background")
    return known


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group over the ranks of `group`, for small messages between the hosts that no device
    is waited for: `group` itself where it is gloo's, else one that is made once.
    """
    if dist.get_backend(group) == "gloo":
        return group
    known = _HOSTS.get(group)
    if known is None:
        with communicating("meeting of all ranks in fully_shard"):
            _count_names_alike(group)
        ranks = dist.get_process_group_ranks(group)
        known = _HOSTS[group] = _beside(group, ranks, "gloo", "sidestream_hosts")
    return known


@atexit.register
def _end_background_groups() -> None:
    """Join their threads while Python still runs: one that lets go of the last operation's tensors
    later would end the process with SIGABRT.
    """
    while _BACKGROUND:
        _, group = _BACKGROUND.popitem()
        if group in _world.pg_map:  # not destroyed with those of a job before this one
            dist.destroy_process_group(group)


def _second_communicator(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """A communicator over the ranks of `group`, one for all models that are sharded over it."""
    known = _SECOND.get(group)
    if known is None:
        with communicating("meeting of all ranks in fully_shard"):
            _count_names_alike(group)
        known = _SECOND[group] = _beside(group, ranks, None, "sidestream_reduce")
    return known


def _beside(
    group: dist.ProcessGroup, ranks: list[int], backend: str | None, description: str
) -> dist.ProcessGroup:
    # The user's time limit holds for both; not every backend tells its own.
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    # Members alone take part, so that other ranks of a larger mesh need not call.
    made = dist.new_group(
        ranks,
        timeout=getattr(options, "_timeout", None),
        backend=backend,
        use_local_synchronization=True,
        group_desc=description,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _count_names_alike(group: dist.ProcessGroup) -> None:
    """Have every rank of `group` count as many process groups as the others, and meet them.

    torch names a group that its members alone make after their ranks and the number of groups that
    a rank has. Those differ where ranks share some groups only: each would wait under another name.
    A group that never gets a member waits for all of them however long it takes, where a collective
    notices the dead.
    """
    own = len(_world.pg_names)
    counts = [own] * dist.get_world_size(group)
    dist.all_gather_object(counts, own, group=group)
    for _ in range(max(counts) - own):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
