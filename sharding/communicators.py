"""Process groups that are made beside those of the user, once for each set of ranks in a job and
shared by all models over it. The only caller of new_group.

Members alone take part, so that other ranks of the job need not call.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .errors import communicating

T = TypeVar("T")
_Made = dict[tuple[str, str, tuple[int, ...]], list[dist.ProcessGroup]]
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, _Made] = weakref.WeakKeyDictionary()
"""By the job's default group, whose end is theirs; by purpose, backend and ranks, the last one
last.
"""
_BACKGROUND, _HOSTS = "background", "hosts"


def communicator(
    purpose: str, ranks: tuple[int, ...], like: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup:
    """That of `purpose` over `ranks`, which call together when it is made. `like`: what its time
    limit is taken from, and its backend where none is given.

    Raises:
        CommunicationError: a rank died before it called.
    """
    made = _made_for(purpose, backend or dist.get_backend(like), ranks)
    return (
        made[-1] if made and _lives(made[-1]) else new_communicator(purpose, ranks, like, backend)
    )


def new_communicator(
    purpose: str,
    ranks: tuple[int, ...],
    like: dist.ProcessGroup,
    backend: str | None = None,
    *,
    timeout: datetime.timedelta | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """One more of `purpose` over `ranks`, which call as often, and in the same order. What is left
    out is as `like` has it. options: torch's for the backend.

    Raises:
        CommunicationError: a rank died before it called.
    """
    default = dist.group.WORLD
    assert default is not None
    backend = backend or dist.get_backend(like)
    if timeout is None:
        # Not every backend tells its time limit.
        limits = getattr(like._get_backend(like._device_types[0]), "options", None)
        timeout = getattr(limits, "_timeout", None)
    if options is not None and timeout is not None:
        options._timeout = timeout  # torch warns where they differ
    made = _made_for(purpose, backend, ranks)
    name = hashlib.sha256(repr((purpose, backend, ranks, len(made))).encode()).hexdigest()
    what = f"making of a communicator ({purpose}) of ranks {list(ranks)}"
    with communicating(what), _named(name), _unbound(default) as bound:
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=f"sidestream_{purpose}",
            device_id=None if purpose in (_BACKGROUND, _HOSTS) else bound,
        )
    assert isinstance(group, dist.ProcessGroup)
    made.append(group)
    return group


def _made_for(purpose: str, backend: str, ranks: tuple[int, ...]) -> list[dist.ProcessGroup]:
    assert dist.group.WORLD is not None
    return _MADE.setdefault(dist.group.WORLD, {}).setdefault((purpose, backend, ranks), [])


def end_communicators(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy those that live, each once; the job's own group stays."""
    for group in dict.fromkeys(groups):
        if group is not dist.group.WORLD and _lives(group):
            dist.destroy_process_group(group)


def require_alike(told: Mapping[int, Sequence[str]], what: str, fix: str) -> None:
    """Refuse what ranks, by their numbers in the job, told each other if it is not the same.

    Raises:
        ValueError: `what` was expected, what came first that differs and on which ranks, `fix`.
    """
    first, ours = next(iter(told.items()))
    for rank, theirs in told.items():
        for expected, got in itertools.zip_longest(ours, theirs, fillvalue="nothing"):
            if got != expected:
                raise ValueError(
                    f"{what} on every rank, got {expected} on rank {first} and {got} on rank "
                    f"{rank}; {fix}"
                )


def gather_objects(value: T, group: dist.ProcessGroup, device: torch.device, what: str) -> list[T]:
    """Every rank's picklable `value`, in rank order. For set-up and error messages only.

    Raises:
        CommunicationError: a rank is gone; `what` names the place.
    """
    if dist.get_world_size(group) == 1:
        return [value]
    found = [value] * dist.get_world_size(group)
    # torch sends objects by way of the current device, which need not be the group's.
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with here, communicating(what):
        dist.all_gather_object(found, value, group=group)
    return found


def background_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A gloo group over the ranks of `group` for a thread beside training; made once (a
    collective).

    Raises:
        CommunicationError: a rank is gone.
    """
    # A group that never gets a member waits for all of them however long it takes, where a
    # collective notices the dead.
    gather_objects(None, group, device, "meeting of all ranks before an asynchronous save")
    return communicator(_BACKGROUND, tuple(dist.get_process_group_ranks(group)), group, "gloo")


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group over the ranks of `group`, for small messages that wait for no device: `group`
    itself where it is gloo's, else one that is made once (a collective).
    """
    if dist.get_backend(group) == "gloo":
        return group
    return communicator(_HOSTS, tuple(dist.get_process_group_ranks(group)), group, "gloo")


@atexit.register
def _end_background_groups() -> None:
    """Join their threads while Python still runs: one that lets go of the last operation's tensors
    later would end the process with SIGABRT.
    """
    for of_a_job in list(_MADE.values()):
        for (purpose, *_), made in of_a_job.items():
            if purpose == _BACKGROUND and _lives(made[-1]):
                dist.destroy_process_group(made[-1])


def _lives(group: dist.ProcessGroup) -> bool:
    """Whether it was not destroyed, as all are with those of a job before this one."""
    return group in c10d._world.pg_map


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Have torch call the group that is made inside `name`.

    Its own name for a group that members alone make counts all groups that a rank has. Those differ
    where ranks share some groups only: each would wait under another name.
    """
    own = c10d._process_group_name
    c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        yield
    finally:
        c10d._process_group_name = own


@contextlib.contextmanager
def _unbound(default: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """Hide inside that `default` is bound to a device, which is given.

    What is made beside a bound group torch splits off it, in which all its ranks must take part,
    not members alone: they would wait for ever.
    """
    bound: torch.device | None = default.bound_device_id
    default.bound_device_id = None
    try:
        yield bound
    finally:
        default.bound_device_id = bound
