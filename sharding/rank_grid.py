"""A grid of ranks with named dimensions: who differs from whom in which of them, from integers
alone, and process groups for those who ask.

    RankGrid((2, 3), ("tp", "dp"))      tp 0 1     the first dimension is the fastest
                                  dp 0  |  0 1     get_rank_enum("tp") == [(0, 1), (2, 3), (4, 5)]
                                  dp 1  |  2 3     get_rank_enum("dp") == [(0, 2, 4), (1, 3, 5)]
                                  dp 2  |  4 5     get_rank_enum("tp-dp") == [(0, 1, 2, 3, 4, 5)]
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arguments import require_count
from .communicators import end_communicators, new_communicator

Dims = str | Sequence[str]
"""Names of dimensions: one, several joined by "-", or a sequence of them; in any order."""


class RankGrid:
    """The ranks of a job from `rank_offset` on, as a grid of `shape`.

    Enumerations need no process group, nor that the ranks exist. Groups are made on request, once
    for each combination of dimensions, by their members alone, all of which ask for the same ones
    in the same order. Any number of grids may lie over the same ranks.

    Raises:
        TypeError: a size is no number.
        ValueError: a size that is no whole number of at least 1, names that are no distinct words.
    """

    def __init__(self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0):
        self.shape, self.dim_names = tuple(shape), tuple(dim_names)
        words = {name for name in self.dim_names if isinstance(name, str) and name.isidentifier()}
        if not words or not len(words) == len(self.dim_names) == len(self.shape):
            raise ValueError(
                f"dim_names: expected a word of its own for each size of {self.shape}, got "
                f"{self.dim_names}; '-' is what joins names for a group"
            )
        require_count("rank_offset", rank_offset, 0)
        self._distances: dict[str, range] = {}  # along each dimension, from coordinate 0
        step = 1
        for name, size in zip(self.dim_names, self.shape, strict=True):
            require_count(f"size of '{name}'", size)
            self._distances[name] = range(0, size * step, step)
            step *= size
        self.ranks = range(rank_offset, rank_offset + step)
        self._made: dict[frozenset[str], dist.ProcessGroup] = {}
        self._base: RankGrid = self
        self._shared: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return described(dict(zip(self.dim_names, self.shape, strict=True)))

    def view(
        self, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] = ()
    ) -> RankGrid:
        """Another grid of the same ranks, such as that of experts. Along `shared_dims`, which both
        have, it enumerates the same groups and has those of this grid.

        Raises:
            TypeError, ValueError: as a grid does, another number of ranks, shared dimensions along
                which groups differ.
        """
        view = RankGrid(shape, dim_names, self.ranks.start)
        if view.ranks != self.ranks:
            raise ValueError(
                f"shape: expected sizes with the product of {self}, got {view}; change those sizes"
            )
        for dim in shared_dims:
            own, other = self.get_rank_enum(dim), view.get_rank_enum(dim)
            if own != other:
                raise ValueError(
                    f"shared_dims: expected the groups of {self} along '{dim}', {own[0]} and so "
                    f"on, got {other[0]} and so on from {view}; let dimensions of the same product "
                    f"come before '{dim}', or do not share it"
                )
        view._base, view._shared = self, frozenset(shared_dims)
        return view

    def get_rank_enum(self, dims: Dims) -> list[tuple[int, ...]]:
        """Every group of ranks that differ in `dims` alone, ascending as the ranks in each.

        Raises:
            ValueError: no, unknown or repeated dimensions.
        """
        own = self._key(dims)
        inside, starts = self._sums(own), self._sums(set(self.dim_names) - own)
        return [tuple(self.ranks.start + start + one for one in inside) for start in starts]

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process is one of the ranks."""
        return dist.get_rank() in self.ranks

    def create_pg(
        self, dims: Dims, *, timeout: datetime.timedelta | None = None, pg_options: Any = None
    ) -> dist.ProcessGroup:
        """The group around this rank along `dims` (a collective of its members). timeout: None for
        the job's own. pg_options: what torch takes.

        Raises:
            KeyError: it was made before.
            ValueError: this rank is not in the grid, or the job has fewer ranks.
            CommunicationError: a member is gone.
        """
        key = self._key(dims)
        made = self._kept(key)
        if key in made:
            raise KeyError(f"dims: {dims!r} has its group already; get_pg gives it")
        rank, job = place_among(self.ranks)
        group = next(group for group in self.get_rank_enum(dims) if rank in group)
        purpose = f"grid_{'-'.join(sorted(key))}"
        made[key] = new_communicator(purpose, group, job, timeout=timeout, options=pg_options)
        return made[key]

    def get_pg(self, dims: Dims) -> dist.ProcessGroup:
        """The group that `create_pg` made.

        Raises:
            KeyError: it was not.
        """
        key = self._key(dims)
        if (group := self._kept(key).get(key)) is None:
            raise KeyError(
                f"dims: expected a combination that has a group, got {dims!r}; call create_pg for "
                "it first, on all ranks of the grid"
            )
        return group

    def destroy(self) -> None:
        """End the groups that were made here; nobody may use them later."""
        end_communicators(self._made.values())
        self._made.clear()

    def to_device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """A mesh of the same ranks, its dimensions the slowest first, with the groups along each (a
        collective where they are still to be made).

        Raises:
            ValueError, CommunicationError: as `create_pg` does.
        """
        names = self.dim_names[::-1]
        keys = map(self._key, names)
        found = [self._kept(key).get(key) or self.create_pg([*key]) for key in keys]
        return mesh_of(self.ranks, self.shape[::-1], names, found, device_type)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> RankGrid:
        """The grid of a mesh's ranks, with its groups.

        Raises:
            ValueError: dimensions without names, or ranks that do not ascend by one, row by row.
        """
        names, ranks = mesh.mesh_dim_names, mesh.mesh.flatten().tolist()
        if names is None or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise ValueError(
                "mesh: expected named dimensions and ranks that ascend by one, row by row, got "
                f"names {names} and ranks {ranks}; make it with init_device_mesh and "
                "mesh_dim_names, and pass all of it"
            )
        grid = cls(tuple(mesh.mesh.shape)[::-1], names[::-1], ranks[0])
        grid._made.update({frozenset([name]): mesh.get_group(name) for name in names})
        return grid

    def _key(self, dims: Dims) -> frozenset[str]:
        names = dims.split("-") if isinstance(dims, str) else list(dims)
        if not names or len(set(names)) != len(names) or not set(names) <= set(self.dim_names):
            raise ValueError(
                f"dims: expected some of {self.dim_names}, each once, got {dims!r}; a name, names "
                "joined by '-', or a sequence of names"
            )
        return frozenset(names)

    def _kept(self, key: frozenset[str]) -> dict[frozenset[str], dist.ProcessGroup]:
        """Where the group along these dimensions is kept."""
        return self._base._kept(key) if key <= self._shared else self._made

    def _sums(self, dims: Iterable[str]) -> list[int]:
        """From coordinate 0 to all others along `dims`, ascending."""
        slow_first = [self._distances[dim] for dim in reversed(self.dim_names) if dim in dims]
        return list(map(sum, itertools.product(*slow_first)))


def described(sizes: dict[str, int]) -> str:
    """A factorisation in words."""
    return " x ".join(f"{n} {s}" for n, s in sizes.items()) + f" = {math.prod(sizes.values())}"


def place_among(ranks: range) -> tuple[int, dist.ProcessGroup]:
    """This process's number in the job, which is one of `ranks`, and the job's group.

    Raises:
        ValueError: it is not, the job has fewer ranks, or there is none.
    """
    job = dist.group.WORLD
    if job is None:
        raise ValueError(
            "ranks: expected a job whose ranks can meet, got no process group; call "
            "torch.distributed.init_process_group first"
        )
    rank, job_size, last = dist.get_rank(), dist.get_world_size(), ranks.stop - 1
    if last >= job_size:
        raise ValueError(
            f"ranks: expected some of the job's {job_size}, got {ranks.start} to {last}; start "
            "more ranks, or make the sizes or the offset smaller"
        )
    if rank not in ranks:
        raise ValueError(
            f"ranks: expected to be called by ranks {ranks.start} to {last} alone, got a call on "
            f"rank {rank}; leave it out there"
        )
    return rank, job


def mesh_of(
    ranks: Sequence[int],
    shape: Sequence[int],
    names: Sequence[str],
    groups: Sequence[dist.ProcessGroup],
    device_type: str,
) -> DeviceMesh:
    """A mesh of `ranks`, row by row, with the groups that there are of each dimension."""
    table = torch.tensor(list(ranks), dtype=torch.int).view(*shape)
    return DeviceMesh.from_group(list(groups), device_type, table, mesh_dim_names=tuple(names))
