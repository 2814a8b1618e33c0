"""A grid of ranks with named dimensions: who differs from whom in which of them, from integers
alone, and process groups for those who ask.

    RankGrid((2, 3), ("tp", "dp"))      tp 0 1     the first dimension is the fastest
                                  dp 0  |  0 1     get_rank_enum("tp") == [(0, 1), (2, 3), (4, 5)]
                                  dp 1  |  2 3     get_rank_enum("dp") == [(0, 2, 4), (1, 3, 5)]
                                  dp 2  |  4 5     get_rank_enum("tp-dp") == [(0, 1, 2, 3, 4, 5)]

A view is a second grid over the same ranks, such as that of experts.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .communicators import end_communicators, new_communicator

Dims = str | Sequence[str]
"""Names of dimensions: one, several joined by "-", or a sequence of them; in any order."""


@dataclass(frozen=True, slots=True)
class Factorisation:
    """Sizes of named dimensions, the fastest first, of the ranks from `rank_offset` on.

    Raises:
        TypeError, ValueError: names that are no distinct words, sizes that are no counts.
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...]
    rank_offset: int = 0

    def __post_init__(self) -> None:
        names, shape = self.dim_names, self.shape
        if len(shape) != len(names) or len(set(names)) != len(names) or not names:
            raise ValueError(
                f"dim_names: expected a distinct name for each size of {shape}, got {names}; give "
                "as many names as sizes"
            )
        if not all(name.isidentifier() for name in names):
            raise ValueError(
                f"dim_names: expected words, got {names}; '-' is what joins them for a group"
            )
        for name, size, least in (
            *((f"size of '{name}'", size, 1) for name, size in zip(names, shape, strict=True)),
            ("rank_offset", self.rank_offset, 0),
        ):
            require_count(name, size, least)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> range:
        """The ranks, by their numbers in the job."""
        return range(self.rank_offset, self.rank_offset + self.size)

    def __str__(self) -> str:
        sizes = " x ".join(f"{n} {s}" for n, s in zip(self.dim_names, self.shape, strict=True))
        return f"{sizes} = {self.size}"

    def in_order(self, dims: Dims) -> tuple[str, ...]:
        """`dims` as a tuple in the order of the grid.

        Raises:
            ValueError: none, unknown or repeated names.
        """
        names = dims.split("-") if isinstance(dims, str) else list(dims)
        if not names or len(set(names)) != len(names) or not set(names) <= set(self.dim_names):
            raise ValueError(
                f"dims: expected some of {self.dim_names}, each once, got {dims!r}; a name, names "
                "joined by '-', or a sequence of names"
            )
        return tuple(name for name in self.dim_names if name in names)

    def step(self, dim: str) -> int:
        """How far neighbours along `dim` are apart."""
        return math.prod(self.shape[: self.dim_names.index(dim)])

    def coordinate(self, rank: int, dim: str) -> int:
        """Where `rank` is along `dim`."""
        size = self.shape[self.dim_names.index(dim)]
        return (rank - self.rank_offset) // self.step(dim) % size

    def groups(self, dims: Dims) -> list[tuple[int, ...]]:
        """Every group of ranks that differ in `dims` alone, ascending as the ranks in each."""
        own = self.in_order(dims)
        inside = self._distances(own)
        starts = self._distances([name for name in self.dim_names if name not in own])
        return [tuple(self.rank_offset + start + one for one in inside) for start in starts]

    def group_of(self, rank: int, dims: Dims) -> tuple[int, ...]:
        """The one of `groups` that `rank` is in."""
        own = self.in_order(dims)
        start = rank - sum(self.coordinate(rank, dim) * self.step(dim) for dim in own)
        return tuple(start + one for one in self._distances(own))

    def _distances(self, dims: Iterable[str]) -> list[int]:
        """From coordinate 0 to all others along `dims`, ascending."""
        found = [0]
        for dim in dims:
            size, step = self.shape[self.dim_names.index(dim)], self.step(dim)
            found = [one + place * step for place in range(size) for one in found]
        return found


class RankGrid:
    """Ranks of the job from `rank_offset` on as a grid, the first of `dim_names` the fastest.

    Enumerations need no process group and not that the ranks exist. Groups are made on request
    (`create_pg`), once for each combination of dimensions, by its members alone; all of them ask
    for the same combinations in the same order. Any number of grids may lie over the same ranks.

    Raises:
        TypeError, ValueError: names that are no distinct words, sizes that are no counts.
    """

    def __init__(self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0):
        own = Factorisation(tuple(shape), tuple(dim_names), rank_offset)
        self._grids: dict[str | None, Factorisation] = {None: own}
        self._shared: dict[str, frozenset[str]] = {}
        self._made: dict[tuple[str | None, tuple[str, ...]], dist.ProcessGroup] = {}

    @property
    def ranks(self) -> range:
        """The ranks, by their numbers in the job."""
        return self._grids[None].ranks

    def factorisation(self, view: str | None = None) -> Factorisation:
        """Sizes and names of the grid, or of a view of it.

        Raises:
            KeyError: no such view.
        """
        if view not in self._grids:
            known = [name for name in self._grids if name is not None]
            raise KeyError(f"view: expected one of {known}, got '{view}'; call register_view first")
        return self._grids[view]

    def register_view(
        self,
        name: str,
        shape: Sequence[int],
        dim_names: Sequence[str],
        shared_dims: Sequence[str] = (),
    ) -> None:
        """Have a second grid over the same ranks. `shared_dims` are in both, with the same groups:
        along them the view has those of the grid.

        Raises:
            ValueError: another number of ranks, shared dimensions that enumerate others, a name
                that is taken.
        """
        own, view = self._grids[None], Factorisation(tuple(shape), tuple(dim_names), self.ranks[0])
        if name in self._grids:
            raise ValueError(f"view: expected a new name, got '{name}', which is one; use another")
        if view.size != own.size:
            raise ValueError(
                f"view '{name}': expected sizes whose product is that of {own}, got {view}; change "
                "the sizes of the view"
            )
        for dim in view.in_order(shared_dims) if shared_dims else ():
            of_view, of_own = view.groups(dim), own.groups(dim)
            if of_view != of_own:
                raise ValueError(
                    f"view '{name}': expected the same groups along '{dim}' as the grid {own} has, "
                    f"{of_own[0]} and so on, got {of_view[0]} from {view}; order the dimensions so "
                    f"that as many ranks come before '{dim}' in both, or do not share it"
                )
        self._grids[name], self._shared[name] = view, frozenset(shared_dims)

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[tuple[int, ...]]:
        """Every group of ranks that differ in `dims` alone, ascending as the ranks in each.

        Raises:
            KeyError: no such view.
            ValueError: unknown dimensions.
        """
        return self.factorisation(view).groups(dims)

    def is_current_rank_in_grid(self) -> bool:
        """Whether this process is one of the ranks."""
        return dist.get_rank() in self.ranks

    def create_pg(
        self,
        dims: Dims,
        *,
        view: str | None = None,
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        pg_options: Any = None,
    ) -> dist.ProcessGroup:
        """The group around this rank along `dims` (a collective of its members). What is left out
        is as the job's group has it. pg_options: those of torch for the backend.

        Raises:
            KeyError: it was made before, or no such view.
            ValueError: this rank is not in the grid, or the job has fewer ranks.
            CommunicationError: a member died before it called.
        """
        key = self._key(dims, view)
        if key in self._made:
            raise KeyError(f"dims: {dims!r} has its group already; get_pg gives it")
        rank, job = require_member(self.ranks)
        self._made[key] = new_communicator(
            f"grid_{'-'.join(key[1])}",
            self.factorisation(view).group_of(rank, dims),
            job,
            backend,
            timeout=timeout,
            options=pg_options,
        )
        return self._made[key]

    def get_pg(self, dims: Dims, *, view: str | None = None) -> dist.ProcessGroup:
        """The group that `create_pg` made.

        Raises:
            KeyError: it was not.
        """
        key = self._key(dims, view)
        if key not in self._made:
            raise KeyError(
                f"dims: expected a combination that has a group, got {dims!r}; call create_pg for "
                "it first, on all ranks of the grid"
            )
        return self._made[key]

    def destroy(self) -> None:
        """End the groups that were made; nobody may use them later."""
        end_communicators(self._made.values())
        self._made.clear()

    def to_device_mesh(self, device_type: str = "cpu", *, view: str | None = None) -> DeviceMesh:
        """A mesh of the same ranks, whose groups are those of each dimension (a collective where
        they are still to be made). Its dimensions come the slowest first, as a mesh has them.

        Raises:
            KeyError, ValueError, CommunicationError: as `create_pg` does.
        """
        own = self.factorisation(view)
        groups = [
            self._made.get(self._key(dim, view)) or self.create_pg(dim, view=view)
            for dim in own.dim_names
        ]
        return mesh_of(own.ranks, own.shape[::-1], own.dim_names[::-1], groups[::-1], device_type)

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
        for name in names:
            grid._made[grid._key(name, None)] = mesh.get_group(name)
        return grid

    def _key(self, dims: Dims, view: str | None) -> tuple[str | None, tuple[str, ...]]:
        """By what a group is found: along shared dimensions alone, a view has those of the grid."""
        own = self.factorisation(view).in_order(dims)
        shared = view is not None and self._shared[view].issuperset(own)
        return None if shared else view, own


def require_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is smaller.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}; pass an int")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}; pass such a number")


def require_member(ranks: range) -> tuple[int, dist.ProcessGroup]:
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
    rank, job_size = dist.get_rank(), dist.get_world_size()
    if ranks.stop > job_size:
        raise ValueError(
            f"ranks: expected some of the job's {job_size}, got {ranks.start} to {ranks.stop - 1}; "
            "start more ranks, or make the sizes or the offset smaller"
        )
    if rank not in ranks:
        raise ValueError(
            f"ranks: expected to be called by ranks {ranks.start} to {ranks.stop - 1} alone, got a "
            f"call on rank {rank}; leave it out there"
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
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(names))
    table = torch.tensor(list(ranks), dtype=torch.int).view(*shape)
    return DeviceMesh.from_group(list(groups), device_type, table, mesh_dim_names=tuple(names))
