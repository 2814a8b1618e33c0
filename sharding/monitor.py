"""Says which unit's collective waits for whom while there is still time: once, before the group's
time limit passes and the backend raises, or NCCL's watchdog ends the process.

A thread looks now and then at what `in_flight` has noted. It refers to models weakly and asks no
event of a GPU before something has been under way for `ASK_SHARE` of the limit: somebody may be
recording a graph, which such a question would spoil. From then on the other ranks are asked too.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from .accounts import Account, AwaitedCollective, account_of, ago
from .explanation import Explanation, Lasting, doing, events_of, explain_runtime, lasting, ranks_of
from .in_flight import REPORTS, Waiting, Work, WorkLog, copy_of, host_waits
from .inquiry import Inquiry, between_looks_s
from .runtime import Runtime
from .store_thread import STORE_THREAD, store_of
from .uses import Uses

_logger = logging.getLogger("sidestream")
ASK_SHARE, SUSPECT_SHARE = 0.5, 0.8
"""Of a group's time limit: the ranks are asked about what has waited for so long, then it is told.
"""
_MOST_S = 10.0
_FAILURE_PATIENCE_S = 0.75  # an error must not wait long for those that may have gone
# What torch's own dumps of its record begin with; the rank follows.
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# NCCL's record, which builds without NCCL lack, and that of the other backends.
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")


@dataclass(frozen=True, slots=True)
class Late:
    """What has waited for most of the time limit of its group. `key` tells it from others."""

    key: Hashable
    what: Lasting
    limit_s: float


def time_limit_s(group: dist.ProcessGroup | None) -> float | None:
    """Seconds after which the backend of `group` gives a collective up; None if it does not say."""
    if group is None or not group._device_types:
        return None
    try:
        options = getattr(group._get_backend(group._device_types[0]), "options", None)
    except RuntimeError:  # destroyed
        return None
    limit = getattr(options, "_timeout", None)
    return None if limit is None else limit.total_seconds()


@dataclass(frozen=True, eq=False, slots=True)
class Watched:
    """What is looked at of one model, with no reference to it: its end is never the thread's
    matter.
    """

    runtime: weakref.ref[Runtime]
    group: weakref.ref[dist.ProcessGroup]
    logs: tuple[WorkLog, ...]
    inquiry: Inquiry | None = None

    @property
    def limit_s(self) -> float | None:
        """The time limit of its collectives."""
        return time_limit_s(self.group())


def find_late(
    watched: Iterable[Watched],
    waits: Iterable[Waiting],
    now_s: float,
    share: float | None = None,
) -> list[Late]:
    """What has been under way for `share` of its limit, by default `SUSPECT_SHARE`: the host's
    waits, and the oldest work of each stream of the models.
    """
    share = SUSPECT_SHARE if share is None else share
    limits = {one: limit for one in watched if (limit := one.limit_s) is not None}
    late = []
    for wait in waits:
        limit_s = time_limit_s(wait.group) or min(limits.values(), default=None)
        if limit_s is not None and now_s - wait.since_s >= share * limit_s:
            late.append(Late((wait.thread, wait.since_s), lasting(wait, now_s), limit_s))
    for one, limit_s in limits.items():
        for log in one.logs:
            for work in _oldest(log, now_s - share * limit_s):
                what = Lasting(work.what, now_s - work.since_s, ranks_of(one.group()))
                late.append(Late((id(log), work.since_s), what, limit_s))
    return late


def _oldest(log: WorkLog, begun_before_s: float) -> list[Work]:
    """The oldest work of a stream that was begun before and is under way, if there is one."""
    # gloo's limit counts from the host's wait.
    return log.in_flight(begun_before_s)[:1] if log.on_gpu else []


class Monitor:
    """A thread that runs as long as one of the models which it watches lives."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._told: set[Hashable] = set()
        self._asked: set[Hashable] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, runtime: Runtime) -> None:
        """Watch a model until it goes, if its process group has a time limit."""
        group = runtime.collectives.groups.group
        if group is None or time_limit_s(group) is None:
            return
        key = id(runtime)
        logs = tuple(lane.log for lane in runtime.lanes)
        with self._changed:
            gone = weakref.ref(runtime, lambda _: self._forget(key))
            inquiry = self._inquiry(group)
            self._watched[key] = Watched(gone, weakref.ref(group), logs, inquiry)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _forget(self, key: int) -> None:
        # Wherever a model goes, in this thread too: no lock.
        self._watched.pop(key, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_interval_s(self._watched.values()))
                if not self._watched:
                    self._thread = None
                    return
            self.look()

    def look(self) -> None:
        """Tell what waits for too long now, unless it was told before."""
        watched, waits, now_s = copy_of(self._watched.values()), host_waits(), time.monotonic()
        suspects = {one.key for one in find_late(watched, waits, now_s, ASK_SHARE)}
        if suspects - self._asked:
            for one in watched:
                if one.inquiry is not None:
                    one.inquiry.ask()
        self._asked = suspects
        late = find_late(watched, waits, now_s)
        new = [one for one in late if one.key not in self._told]
        self._told = {one.key for one in late}
        if new:
            _note_obstacle(watched, now_s - max(one.what.lasting_s for one in new))
            _logger.warning("%s", _report(new, watched))

    def ask_after_failure(self) -> None:
        """Have the ranks asked by a thread in which a collective has failed, and wait a moment."""
        watched, now_s = copy_of(self._watched.values()), time.monotonic()
        inquiries = {id(one.inquiry): one.inquiry for one in watched if one.inquiry is not None}
        reachable = [inquiry for inquiry in inquiries.values() if not inquiry.obstacle()]
        for inquiry in reachable:
            inquiry.ask(_FAILURE_PATIENCE_S)
        for inquiry in reachable:
            inquiry.wait(max(now_s + 2 * _FAILURE_PATIENCE_S - time.monotonic(), 0.0))
        _note_obstacle(watched, now_s)

    def explain(self, runtime: Runtime, ask_others_s: float = 0.0) -> Explanation:
        """See `fully_shard.explain`."""
        one = self._watched.get(id(runtime))
        inquiry = None if one is None else one.inquiry
        if inquiry is not None and ask_others_s > 0:
            inquiry.ask()
            if not inquiry.wait(ask_others_s):
                waited = f"no answer has come within {ask_others_s:g} s"
                REPORTS.keep(time.monotonic(), inquiry.obstacle() or waited)
        return explain_runtime(runtime)

    def _inquiry(self, group: dist.ProcessGroup) -> Inquiry | None:
        """That of `group`, if its ranks can ask each other."""
        for one in copy_of(self._watched.values()):
            if one.group() is group:
                return one.inquiry
        limit_s, weak = time_limit_s(group), weakref.ref(group)
        if limit_s is None or group.size() == 1 or store_of(group) is None:
            return None
        inquiry = Inquiry(
            lambda: None if (group := weak()) is None else store_of(group),
            group.rank(),
            ranks_of(group),
            account=functools.partial(self._account, weak),
            moved_s=functools.partial(self._moved_s, weak),
            limit_s=limit_s,
        )
        STORE_THREAD.watch(inquiry)
        return inquiry

    def _moved_s(self, group: weakref.ref[dist.ProcessGroup]) -> float:
        """When a model of `group` did something last (`time.monotonic`)."""
        models = [one.runtime() for one in copy_of(self._watched.values()) if one.group is group]
        return max((model.trace.latest_s() for model in models if model is not None), default=0.0)

    def _account(self, group: weakref.ref[dist.ProcessGroup]) -> Account:
        """What this process says of itself to the ranks of `group`."""
        watched, now_s = copy_of(self._watched.values()), time.monotonic()
        models = [model for one in watched if (model := one.runtime()) is not None]
        events = [event for model in models for event in events_of(model)]
        return account_of(
            dist.get_rank() if dist.is_initialized() else 0,
            "; ".join(dict.fromkeys(map(doing, models))),
            _awaited(watched, now_s, ranks_of(group())),
            [ago(*event) for event in sorted(events, key=lambda event: event[1])],
        )


MONITOR = Monitor()
"""That of this process."""
REPORTS.ask = MONITOR.ask_after_failure


def _interval_s(watched: Iterable[Watched]) -> float:
    limits = [limit for one in copy_of(watched) if (limit := one.limit_s) is not None]
    return between_looks_s(min(limits, default=0.0), _MOST_S)


def _awaited(
    watched: Iterable[Watched], now_s: float, asked: tuple[int, ...]
) -> list[AwaitedCollective]:
    """The collectives in which this process stands, for the ranks that are `asked`: its host, and
    streams of which that may be found out.
    """
    found = [(wait.what, wait.since_s, wait.group, wait.peer, wait.owner) for wait in host_waits()]
    for one in watched:
        if (model := one.runtime()) is None or (limit_s := one.limit_s) is None:
            continue
        works = [work for log in one.logs for work in _oldest(log, now_s - ASK_SHARE * limit_s)]
        uses, group = model.collectives.uses, one.group()
        found += [(work.what, work.since_s, group, "", uses) for work in works]
    return [
        AwaitedCollective(
            what=what,
            number=owner.numbered(what)[1] if isinstance(owner, Uses) else -1,
            lasting_s=now_s - since_s,
            ranks=() if (ranks := ranks_of(group)) == asked else ranks,
            peer=peer,
            model=owner.model if isinstance(owner, Uses) else -1,
        )
        for what, since_s, group, peer, owner in found
    ]


def _note_obstacle(watched: Iterable[Watched], since_s: float) -> None:
    """Why the ranks that were asked have not answered `since_s`, for whom this rank tells."""
    _, text = REPORTS.latest(since_s)
    obstacles = [one.inquiry.obstacle() for one in watched if one.inquiry is not None]
    if not text and any(obstacles):
        REPORTS.keep(time.monotonic(), next(filter(None, obstacles)))


def _report(late: Sequence[Late], watched: Sequence[Watched]) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    lines = [
        f"rank {rank}: {one.what}, and fails after {one.limit_s:g} s; look for the rank that waits "
        "for something else, or tells nothing"
        for one in late
    ]
    if (path := dump_flight_record(os.environ, rank)) is not None:
        lines.append(f"torch's flight record: {path}")
    for one in watched:
        if (runtime := one.runtime()) is not None:
            lines.append(str(explain_runtime(runtime)))
    return "\n".join(lines)


def dump_flight_record(environ: Mapping[str, str], rank: int) -> Path | None:
    """Write torch's record of collectives to where the environment says that dumps go; None where
    it does not, or there is no record.
    """
    prefix = next((environ[name] for name in _DUMP_VARIABLES if environ.get(name)), None)
    if prefix is None:
        return None
    path = Path(f"{prefix}{rank}")
    try:
        record = _flight_record()
        if record is None:
            return None
        path.write_bytes(record)
    except (OSError, RuntimeError) as error:
        _logger.warning("torch's flight record was not written to %s: %s", path, error)
        return None
    return path


def _flight_record() -> bytes | None:
    """The first of torch's records with a collective in it, else the last; None if torch has none.

    Raises:
        RuntimeError: torch cannot give it.
    """
    records = [dump() for name in _DUMPS if (dump := getattr(_c10d, name, None))]
    noted = (record for record in records if pickle.loads(record).get("entries"))
    return next(noted, records[-1] if records else None)
