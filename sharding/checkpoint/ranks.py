"""The ranks that save and load a module together, and the paths that are theirs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from ..communicators import background_group
from ..data_parallel_groups import device_of
from ..entries import runtimes_over
from ..errors import communicating
from ..storage import Location
from .folder import shown


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of `group`, by their numbers in the whole job; this one is the `place`-th.

    Without a group it is this process alone. `device`: by way of which they communicate.
    """

    group: dist.ProcessGroup | None
    numbers: tuple[int, ...]
    place: int
    device: torch.device

    @property
    def number(self) -> int:
        """This rank's number in the whole job."""
        return self.numbers[self.place]

    @property
    def leads(self) -> bool:
        """Whether this rank makes folders, writes what all hold whole, and publishes."""
        return self.place == 0

    def apart(self) -> Ranks:
        """The same ranks over a group that a thread may use while this one goes on (a collective).

        Raises:
            CommunicationError: a rank died meanwhile.
        """
        if self.group is None:
            return self
        return replace(self, group=background_group(self.group, self.device))

    def __str__(self) -> str:
        return f"rank{'s' if len(self.numbers) > 1 else ''} {in_ranges(self.numbers)}"


def this_rank() -> Ranks:
    """This process alone."""
    number = dist.get_rank() if dist.is_initialized() else 0
    return Ranks(None, (number,), 0, torch.device("cpu"))


def ranks_of(module: object) -> Ranks:
    """Those that `module` is sharded over, all of the job where it is not.

    Raises:
        ValueError: its parts are sharded over different ranks, or it has experts that are.
    """
    runtimes = runtimes_over(module) if isinstance(module, nn.Module) else []
    for runtime in runtimes:
        runtime.ranks.require_one_value("module")
    groups = [runtime.collectives.groups for runtime in runtimes]
    found = [_ranks_in(one.group, one.device) for one in groups]
    if not found:
        world = dist.group.WORLD if dist.is_initialized() else None
        found = [_ranks_in(world, device_of(world))]
    for ranks in found:
        if ranks.numbers != found[0].numbers:
            raise ValueError(
                f"module: expected one that is sharded over the same ranks throughout, got parts "
                f"on {found[0]} and on {ranks}; save and load each of them by itself, with a path "
                "of its own"
            )
    return found[0]


def _ranks_in(group: dist.ProcessGroup | None, device: torch.device) -> Ranks:
    if group is None:
        return this_rank()
    return Ranks(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), device)


def claim(target: Location, ranks: Ranks) -> None:
    """Have `target` belong to `ranks` for the rest of the job; one of them calls.

    Raises:
        ValueError: it belongs to others.
        CommunicationError: the job's store does not answer.
    """
    if not dist.is_initialized():
        return
    key = f"sidestream/checkpoint/{hashlib.sha256(os.fsencode(target)).hexdigest()}"
    with communicating(f"claim of {shown(target)} in the store of the job"):
        owner = _get_default_store().compare_set(key, "", str(ranks)).decode()
    if owner != str(ranks):
        raise ValueError(
            f"path: expected a checkpoint that no other model of this job is saved to, got "
            f"{shown(target)} for the model on {ranks}, where the one on {owner} is saved; give "
            "every model or pipeline stage a path of its own, such as sub-folders step-10/stage0 "
            "and step-10/stage1"
        )


def in_ranges(numbers: Sequence[int]) -> str:
    """`numbers` in short: 0-3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
