"""Which ranks a model is sharded over, and where each stands: names of a mesh's dimensions become
axes. Nothing here communicates.

    axes, the fastest first        of                                   hold
    dp_shard                       dp_shard_dim, or all ranks           a part each
    dp_shard/node, dp_shard/rail   the same, split by ranks_per_node    a part each
    dp_outer                       dp_outer_dim                         the same, or a part each

Names decide, not positions: a mesh's dimensions come in any order, and a flattened one has the name
it was flattened to.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arguments import kind_of, require_number

SHARD_AXIS = "dp_shard"
"""The axis where there is no mesh, or none with names."""


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Axes and the ranks along them, by their numbers in the job.

    `coordinates` has every data-parallel rank, ascending; along each axis ranks ascend too.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: Mapping[int, tuple[int, ...]]

    def lines(self, axis: int) -> list[tuple[int, ...]]:
        """The ranks that differ along `axis` alone: a line each, ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self.coordinates.items():
            found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
        return [tuple(line) for line in found.values()]

    def along(self, axis: int, rank: int) -> tuple[int, ...]:
        """The line along `axis` that `rank` is in."""
        return next(line for line in self.lines(axis) if rank in line)

    def split_by_node(self, ranks_per_node: int) -> MeshAxes:
        """The first axis in two: the ranks of a node, then those with one place in every node."""
        name, size = self.names[0], self.sizes[0]
        if ranks_per_node in (1, size):
            return self
        return MeshAxes(
            (f"{name}/node", f"{name}/rail", *self.names[1:]),
            (ranks_per_node, size // ranks_per_node, *self.sizes[1:]),
            {
                rank: (first % ranks_per_node, first // ranks_per_node, *rest)
                for rank, (first, *rest) in self.coordinates.items()
            },
        )

    def __str__(self) -> str:
        sizes = " x ".join(
            f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True)
        )
        return f"{sizes} of ranks {list(self.coordinates)}"


def require_mesh(mesh: object, shard_dim: object, outer_dim: object = None) -> None:
    """Refuse a mesh or a dimension's name of another type; None stands for all of them.

    Raises:
        TypeError: one is something else.
        ValueError: both names are the same.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh: expected a DeviceMesh, got {kind_of(mesh)}; make one with "
            "torch.distributed.device_mesh.init_device_mesh, or leave it out to use all ranks"
        )
    for argument, name in (("dp_shard_dim", shard_dim), ("dp_outer_dim", outer_dim)):
        if name is not None and not isinstance(name, str):
            raise TypeError(
                f"{argument}: expected the name of one of the mesh's dimensions, got {name!r}; "
                "name the dimension when making the mesh (mesh_dim_names=...)"
            )
        if name is not None and mesh is None:
            raise ValueError(
                f"{argument}: expected a device_mesh that has dimension '{name}', got none; pass "
                "the mesh, or leave the name out to use all ranks"
            )
    if outer_dim is not None and outer_dim == shard_dim:
        raise ValueError(
            f"dp_outer_dim: expected another dimension than dp_shard_dim, got '{outer_dim}' for "
            "both; name the dimension over which nodes or replicas differ, or leave it out"
        )


def require_ranks_per_node(value: object) -> None:
    """Refuse what is no count of ranks.

    Raises:
        TypeError: it is no number.
        ValueError: it is no whole one, or below 1.
    """
    if value is not None:
        expected = "None or a whole number of at least 1"
        require_number(
            "ranks_per_node", value, expected, lambda n: n >= 1 and isinstance(n, numbers.Integral)
        )


def all_ranks(world_size: int) -> MeshAxes:
    """One axis over the whole job."""
    return MeshAxes((SHARD_AXIS,), (world_size,), {rank: (rank,) for rank in range(world_size)})


def axes_of_mesh(
    mesh: DeviceMesh, shard_dim: str | None, outer_dim: str | None, rank: int
) -> tuple[MeshAxes, tuple[dist.ProcessGroup, ...]]:
    """The axes of the named dimensions, and the mesh's own group of each around `rank`.

    Raises:
        ValueError: unknown, missing or overlapping dimensions, a mesh without this rank, ranks in
            another order along one dimension than along the next.
    """
    known = _known_names(mesh)
    for argument, name in (("dp_shard_dim", shard_dim), ("dp_outer_dim", outer_dim)):
        if name is not None and name not in known:
            raise ValueError(
                f"{argument}: expected one of the mesh's dimension names {known}, got '{name}'; "
                "name the dimension when making the mesh (mesh_dim_names=...) or pass one of these"
            )
    if shard_dim is None and (mesh.ndim != 1 or outer_dim is not None):
        raise ValueError(
            "dp_shard_dim: expected the name of the dimension to shard over, because device_mesh "
            f"has {mesh.ndim} dimensions {known}; got None"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"device_mesh: expected a mesh of which this rank is part, got ranks "
            f"{mesh.mesh.flatten().tolist()} on rank {rank}; call fully_shard on those ranks alone"
        )
    names = tuple(name for name in (shard_dim, outer_dim) if name is not None)
    groups = tuple(mesh.get_group(name) for name in names) or (mesh.get_group(0),)
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    order = _root_of(mesh).mesh.flatten().tolist()
    names = names or mesh.mesh_dim_names or (SHARD_AXIS,)
    return resolve_axes(names, ranks, order, rank), groups


def resolve_axes(
    names: tuple[str, ...], ranks: Sequence[Sequence[int]], order: Sequence[int], rank: int
) -> MeshAxes:
    """Axes from what one rank knows: the `ranks` along each of them, itself among them, and all of
    the mesh's, row by row.

    Along a dimension of a mesh places are a fixed number apart, so from any rank the way to another
    is the sum of one way along each axis.

    Raises:
        ValueError: axes overlap, or ranks do not ascend along them.
    """
    for name, along in zip(names[1:], ranks[1:], strict=True):
        if shared := sorted(set(ranks[0]) & set(along) - {rank}):
            raise ValueError(
                f"dp_outer_dim: expected a dimension without ranks of '{names[0]}' beside one's "
                f"own, got '{name}', which has {shared} too; pass dimensions that do not overlap"
            )
    places = {one: place for place, one in enumerate(order)}
    found: dict[tuple[int, ...], int] = {(): places[rank]}
    for along in ranks:
        found = {
            (*coordinate, index): place + places[one] - places[rank]
            for coordinate, place in found.items()
            for index, one in enumerate(along)
        }
    sizes = tuple(len(along) for along in ranks)
    coordinates = {order[place]: coordinate for coordinate, place in found.items()}
    assert len(coordinates) == math.prod(sizes), f"dimensions {names} of the mesh overlap"
    axes = MeshAxes(names, sizes, dict(sorted(coordinates.items())))
    for axis, name in enumerate(names):
        for line in axes.lines(axis):
            if [axes.coordinates[one][axis] for one in line] != list(range(sizes[axis])):
                raise ValueError(
                    "device_mesh: expected ranks that ascend along every data-parallel dimension, "
                    f"as those of its groups do, got another order along '{name}' of {axes}; make "
                    "the mesh from ascending ranks"
                )
    return axes


def ranks_per_node_of(
    axes: MeshAxes, asked: Mapping[int, int | None], nodes: Mapping[int, str | None]
) -> int:
    """How many neighbours along the first axis are taken together, 1 for no split.

    asked: what each rank was given. nodes: the node that each one's launcher names. Where nothing
    was asked the axis splits if all its nodes have as many ranks, side by side.

    Raises:
        ValueError: ranks were given different numbers, or one that does not divide.
    """
    first, given = next(iter(asked.items()))
    for rank, other in asked.items():
        if other != given:
            raise ValueError(
                f"ranks_per_node: expected the same on every rank, got {given} on rank {first} and "
                f"{other} on rank {rank}; pass one value"
            )
    size = axes.sizes[0]
    if given is None:
        found = {_ranks_on_a_node([nodes[rank] for rank in line]) for line in axes.lines(0)}
        return found.pop() if len(found) == 1 else 1
    if size % given:
        raise ValueError(
            f"ranks_per_node: expected a number that divides the {size} ranks to shard over, got "
            f"{given}; pass how many of them are on each node, or 1 to take no heed of nodes"
        )
    return given


def _ranks_on_a_node(nodes: Sequence[str | None]) -> int:
    """Of one line: the ranks on each node where they are as many, side by side; else 1."""
    count = nodes.count(nodes[0])
    blocks = [nodes[start : start + count] for start in range(0, len(nodes), count)]
    regular = all(len(set(block)) == 1 and nodes.count(block[0]) == count for block in blocks)
    return count if regular and None not in nodes else 1


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """What `mesh` was sliced from, itself where it was not."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def _known_names(mesh: DeviceMesh) -> list[str]:
    """Its dimensions' names, and those that it or its root was flattened to."""
    return [*(mesh.mesh_dim_names or ()), *getattr(_root_of(mesh), "_flatten_mapping", ())]
