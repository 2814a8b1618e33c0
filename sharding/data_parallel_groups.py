"""From a device mesh (or nothing) to the axes, the device and the communicators of a sharded model.

group     all data-parallel ranks: agreements, checkpoints
gather    along one axis: parameters
reduce    along one axis, beside the other: gradients
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .communicators import communicator, gather_objects, require_alike
from .errors import communicating
from .mesh_axes import (
    SHARD_AXIS,
    MeshAxes,
    all_ranks,
    axes_of_mesh,
    ranks_per_node_of,
    require_ranks_per_node,
)

ONE_RANK_VARIABLE = "SIDESTREAM_ONE_RANK_GROUPS"
"""Set to 1, an axis of one rank has communicators as others have: for checks on one GPU."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the data-parallel ranks: the `ranks` that differ along it alone, by their numbers
    in the job and in the order of their coordinates, this one's coordinate `rank`, and two
    communicators over them.

    Two, so that gathers and reductions never queue behind each other; None at size 1.
    """

    name: str
    ranks: Sequence[int]
    rank: int
    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class DataParallelGroups:
    """All data-parallel ranks and the axes they lie along.

    rank, world_size: in `group`, which is None without an initialised process group. axes: the one
    to shard over first (or its ranks of a node, then its rails), the outermost last. coordinates:
    along `axes`, of every rank of `group`.
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


def initialize_from_environment() -> bool:
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
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        shorten_flight_record()
        dist.init_process_group("gloo")
    return True


def data_parallel_groups(
    mesh: DeviceMesh | None,
    shard_dim: str | None,
    outer_dim: str | None = None,
    *,
    ranks_per_node: int | None = None,
    devices: Iterable[torch.device] = (),
    told: str = "",
) -> DataParallelGroups:
    """The groups to shard over `shard_dim` of `mesh`, its only dimension, or all ranks; and over
    `outer_dim` beside it (a collective).

    ranks_per_node: splits the first axis. devices: those of the model's parameters. told: what all
    ranks have to say alike besides.

    Raises:
        ValueError: wrong dimensions or ranks_per_node, a mesh without this rank, ranks with
            different ones, parameters on another GPU than the group's.
        CommunicationError: a rank is gone, or was given other ranks to shard over.
        RuntimeError: more ranks than GPUs on this machine.
    """
    require_ranks_per_node(ranks_per_node)
    if mesh is None and not initialize_from_environment():
        if ranks_per_node is not None:
            raise ValueError(
                f"ranks_per_node: expected a process group whose ranks are split, got none and "
                f"{ranks_per_node}; start with torchrun or init_process_group, or leave it out"
            )
        device = device_of(None, None, devices)
        return DataParallelGroups(
            0, 1, device, None, (Axis(SHARD_AXIS, (0,), 0, None, None),), ((0,),)
        )
    own = dist.get_rank()
    if mesh is None:
        assert dist.group.WORLD is not None
        axes = all_ranks(dist.get_world_size())
        bases: tuple[dist.ProcessGroup, ...] = (dist.group.WORLD,)
    else:
        axes, bases = axes_of_mesh(mesh, shard_dim, outer_dim, own)
    device = device_of(bases[0], mesh, devices)
    ranks = tuple(axes.coordinates)
    group = group_over(ranks, bases)
    if len(bases) == 1 and bases[0] is not dist.group.WORLD:
        told += ", in a group of its own"
    axes = _agree(axes, ranks_per_node, _meeting_of(ranks, group), device, told)
    split = len(axes.names) - len(bases)
    made = []
    for number, name in enumerate(axes.names):
        base = bases[max(0, number - split)]
        # A mesh's own group gathers along its dimension; what that was split in needs new ones.
        gather = None if split and number <= split else base
        made.append(_axis(name, axes.along(number, own), own, gather, base, device))
    return DataParallelGroups(
        ranks.index(own), len(ranks), device, group, tuple(made), tuple(axes.coordinates.values())
    )


def device_of(
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None = None,
    devices: Iterable[torch.device] = (),
) -> torch.device:
    """By way of which `group` communicates. What `mesh` says stands, over gloo too, by which ranks
    can share a GPU. Which GPU: the one that the group is bound to, else that of the model's
    `devices`, else the current one.

    Raises:
        ValueError: parameters on several GPUs, or on another than the group's.
    """
    over_gloo = group is not None and dist.get_backend(group) == "gloo"
    kind = mesh.device_type if mesh is not None else "cpu" if over_gloo else "cuda"
    if kind != "cuda" or not torch.cuda.is_available():
        return torch.device("cpu")
    held = sorted({device for device in devices if device.type == "cuda"}, key=str)
    if len(held) > 1:
        raise ValueError(
            f"module: expected parameters on one GPU, got some on each of {_listed(held)}; move "
            "the model to this rank's own"
        )
    bound = _bound_device(group)
    if bound is None:
        return held[0] if held else torch.device("cuda", torch.cuda.current_device())
    if held and held[0] != bound:
        raise ValueError(
            f"module: expected parameters on {bound}, to which the process group is bound, got "
            f"them on {held[0]}; move the model there, or pass that device_id to "
            "init_process_group"
        )
    return bound


def held_device_type(module: nn.Module) -> str | None:
    """The device type of a mesh for `module`: "cuda" if it lies on a GPU, which gloo serves too,
    else None: the backend says it.
    """
    return "cuda" if any(param.is_cuda for param in module.parameters()) else None


def _listed(devices: Iterable[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _bound_device(group: dist.ProcessGroup | None) -> torch.device | None:
    for one in (group, dist.group.WORLD if dist.is_initialized() else None):
        if one is not None and one.bound_device_id is not None:
            return one.bound_device_id
    return None


def group_over(ranks: tuple[int, ...], bases: tuple[dist.ProcessGroup, ...]) -> dist.ProcessGroup:
    """One of `bases`, or the job's group, where it has these ranks; else one of our own."""
    world, first = dist.group.WORLD, bases[0]
    known = [*bases]
    if world is not None and dist.get_backend(world) == dist.get_backend(first):
        known.append(world)
    for group in known:
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return communicator("all", ranks, first)


def _meeting_of(ranks: tuple[int, ...], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The job's group in place of `group`, over the same `ranks`: those that were passed no group
    are there, and all find at once that others were.
    """
    job = dist.group.WORLD
    assert job is not None
    is_alike = dist.get_backend(job) == dist.get_backend(group)
    return job if is_alike and tuple(dist.get_process_group_ranks(job)) == ranks else group


def _agree(
    axes: MeshAxes,
    ranks_per_node: int | None,
    group: dist.ProcessGroup,
    device: torch.device,
    text: str,
) -> MeshAxes:
    """The axes of all ranks, split by node as they all decide (a collective).

    Raises:
        ValueError: meshes, ranks_per_node or `text` differ, or ranks_per_node does not divide.
    """
    own = (f"{axes}{text}", ranks_per_node, _node_of_this_process())
    what = f"meeting of all ranks to shard over {axes}"
    told = dict(zip(axes.coordinates, gather_objects(own, group, device, what), strict=True))
    require_alike(
        {rank: [theirs] for rank, (theirs, *_) in told.items()},
        "device_mesh: expected the same dimensions",
        "make one mesh, or process_groups, on all ranks and name the same dimensions",
    )
    asked = {rank: count for rank, (_, count, _) in told.items()}
    nodes = {rank: node for rank, (*_, node) in told.items()}
    return axes.split_by_node(ranks_per_node_of(axes, asked, nodes))


def _node_of_this_process() -> str | None:
    """What torchrun numbers nodes by; the machine's name under launchers that only say how many
    ranks it has; None where nothing was said.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def _axis(
    name: str,
    ranks: tuple[int, ...],
    own: int,
    gather: dist.ProcessGroup | None,
    like: dist.ProcessGroup,
    device: torch.device,
) -> Axis:
    """gather: the communicator that there is already. like: one whose backend and time limit hold
    for what is made.
    """
    if len(ranks) == 1 and os.environ.get(ONE_RANK_VARIABLE) != "1":
        return Axis(name, ranks, 0, None, None)
    if gather is None:
        gather = communicator("gather", ranks, like)
    reduce = communicator("reduce", ranks, like)
    _use_once(gather, reduce, device, f"first use of the communicators along '{name}'")
    return Axis(name, ranks, ranks.index(own), gather, reduce)


def _use_once(
    gather: dist.ProcessGroup, reduce: dist.ProcessGroup, device: torch.device, what: str
) -> None:
    """NCCL connects ranks when they first communicate, which takes seconds: not inside backward."""
    size = dist.get_world_size(gather)
    sent, received = torch.zeros(size, device=device), torch.zeros(size, device=device)
    with communicating(what):
        dist.all_gather(list(received.split(1)), sent[:1], group=gather)
        dist.all_to_all_single(received, sent, group=reduce)
