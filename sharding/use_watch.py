"""Ranks that use different units are told so, and do not wait for each other until the time limit.

    a rank       waits for `PATIENCE_S`: says in the group's store what it used and waits for
    rank 0       compares what ranks say: different uses under one number are a verdict at once;
                 waits for each other are one when every rank has confirmed that it still waits
    each rank    ends its own wait over gloo, and raises the verdict

A thread does so beside the one that waits. A rank that uses no unit for as long answers too, if
somebody asks. Nothing is sent while nobody waits: the store is not asked before that.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import logging
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .communicators import host_group
from .errors import DivergentUseError, communicating
from .expert_ranks import ModelRanks
from .in_flight import Waiting, host_waits
from .store_thread import GRACE_S, STORE_THREAD, store_of
from .uses import RankUses, deadlock, first_difference, standing

_logger = logging.getLogger("sidestream")
PATIENCE_S = 2.0
"""A wait of that length is told to the other ranks."""
WARN_S = 10.0
"""A wait of that length that nothing explains is told to the user."""
_SAID, _COMPARED = 32, 256  # of the last uses
_SPARE_TAG = 0x51DF_0000  # of messages that nobody sends
_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = (
    weakref.WeakKeyDictionary()
)


class Watch:
    """Of one model on this rank."""

    look_s = 0.25

    def __init__(self, ranks: ModelRanks, store: dist.Store) -> None:
        """A collective where messages have no tags. `store`: that of the group."""
        collectives, axes = ranks.together, [channel.axis for channel in ranks.channels]
        group = collectives.groups.group
        assert group is not None
        self._store = dist.PrefixStore(f"sidestream_uses/{collectives.uses.model}", store)
        self._groups = [g for axis in axes for g in (axis.gather, axis.reduce)]
        self._collectives = collectives
        self._uses = collectives.uses
        self._rank, self._world_size = collectives.rank, collectives.world_size
        is_tagged = all(channel.tags_messages for channel in ranks.channels)
        self._host_group = None if is_tagged else host_group(group)
        # What the thread knows.
        self._seen: tuple[Waiting | None, int, int] = (None, 0, 0)
        self._since_s = time.monotonic()
        self._has_said = self._has_warned = False
        self._serial = 0
        self._candidate = ""
        self._spare: list[tuple[torch.Tensor, dist.Work]] = []
        self._verdict: str | None = None
        self._failed = False
        self._looked = threading.Event()
        explain = weakref.WeakMethod(self._explain)
        self._uses.explain = lambda: known() if (known := explain()) is not None else None
        STORE_THREAD.watch(self)

    @property
    def gave_up(self) -> bool:
        """Whether this rank knows that ranks wait for each other."""
        return self._verdict is not None

    def ends(self, what: str, *, compares: bool) -> None:
        """Note it; where messages have no tags, compare what all ranks did so far.

        Raises:
            DivergentUseError: not the same; on all ranks.
        """
        self._uses.gathers.note_end(what)
        if compares and self._host_group is not None:
            self._compare(f"comparison of the ranks at the {what}")

    def _compare(self, what: str) -> None:
        assert self._host_group is not None
        records = (self._uses.gathers, self._uses.exchanges)
        own = [number for record in records for number in (record.count, record.fingerprint)]
        values = torch.tensor([own, [-number for number in own]], dtype=torch.int64)
        group = self._host_group
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        self._collectives.agree(work, what, group)
        if bool((values[0] == -values[1]).all()):
            return
        said: list[tuple[Any, ...]] = [()] * self._world_size
        with communicating(what):
            dist.all_gather_object(said, self._own(None), group=group)
        found = first_difference([_of(*one) for one in said])
        raise _divergent(found or "some gathered more than others")

    def _explain(self) -> Exception | None:
        """Why something failed: the verdict, if there is one. The first rank to read it left the
        others.
        """
        if self._verdict is None:
            # The thread asks, since a store whose host is stopped never answers.
            self._looked.clear()
            self._failed = True
            STORE_THREAD.wake()
            self._looked.wait(GRACE_S)
        return None if self._verdict is None else _divergent(self._verdict)

    # ---- in the thread

    def look(self) -> None:
        """Find out whether something is wrong, and what."""
        if self._failed:
            self._answer_failed()
            return
        waits, now_s = self._waits(), time.monotonic()
        if not self._is_where_it_was(waits):
            if self._has_said:
                self._say(None)  # what was said of its wait is no longer true
            self._seen = (waits, *self._counts())
            self._since_s, self._has_said, self._has_warned = now_s, False, False
        if now_s - self._since_s < PATIENCE_S:
            return
        if not self._has_said:
            if waits is None and not self._store.check(["asked"]):
                return
            self._say(waits)
            self._has_said = True
        if waits is not None:
            self._store.set("asked", "")
        self._find_out(waits, now_s - self._since_s)

    def _waits(self) -> Waiting | None:
        """In which collective of this model this rank stands."""
        return next((wait for wait in host_waits() if wait.owner is self._uses), None)

    def _find_out(self, waits: Waiting | None, waited_s: float) -> None:
        if self._rank == 0:
            self._judge()
        if self._store.check(["verdict"]):
            self._take_verdict()
            if waits is not None:
                self._end_waits()
        elif waits is not None:
            self._confirm()
            if waited_s > WARN_S and not self._has_warned:
                self._has_warned = True
                self._warn(waited_s)

    def _counts(self) -> tuple[int, int]:
        return self._uses.gathers.count, self._uses.exchanges.count

    def _is_where_it_was(self, waits: Waiting | None) -> bool:
        return self._seen == (waits, *self._counts())

    def _say(self, waits: Waiting | None) -> None:
        """Tell the other ranks where this one is."""
        self._serial += 1
        text = json.dumps((self._serial, *self._own(waits, _SAID)))
        self._store.set(f"rank {self._rank}", text)

    def _own(self, waits: Waiting | None, most: int = _COMPARED) -> tuple[Any, ...]:
        uses = self._uses
        numbered = None if waits is None else uses.numbered(waits.what)
        return uses.gathers.latest(most), uses.exchanges.latest(most), uses.agreements, numbered

    def _said(self) -> list[str | None]:
        """What each rank said last."""
        keys = [f"rank {rank}" for rank in range(self._world_size)]
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    def _judge(self) -> None:
        said = self._said()
        uses = [_parsed(text) for text in said]
        verdict = first_difference(uses)
        if verdict is None and (reason := deadlock(uses)) is not None:
            # All said so at one time if all confirm it now: nobody can have gone on between.
            candidate = hashlib.sha256(repr(said).encode()).hexdigest()
            self._store.set("candidate", candidate)
            ranks = range(self._world_size)
            votes = [f"{candidate} {rank}" for rank in ranks]
            self._confirm()
            verdict = reason if self._store.check(votes) else None
        if verdict is not None:
            self._store.set("verdict", verdict)

    def _confirm(self) -> None:
        """Confirm that this rank still waits, to whoever asks whether all do."""
        if self._store.check(["candidate"]):
            candidate = self._store.get("candidate").decode()
            waits = self._waits()
            still = waits is not None and self._has_said and self._is_where_it_was(waits)
            if still and candidate != self._candidate:
                self._candidate = candidate
                self._store.set(f"{candidate} {self._rank}", "")

    def _take_verdict(self) -> None:
        self._verdict = self._store.get("verdict").decode()
        self._store.set(f"told {self._rank}", "")
        if self._rank == 0:
            # It may be the store's host: the others have to read it first.
            told = [f"told {rank}" for rank in range(self._world_size)]
            deadline = time.monotonic() + GRACE_S
            while not self._store.check(told) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _end_waits(self) -> None:
        """Have the waits of this rank fail: gloo gives a group up when any wait overruns."""
        for group in (*self._groups, self._host_group, self._collectives.groups.group):
            if group is not None and dist.get_backend(group) == "gloo":
                peer = 1 if group.rank() == 0 else 0
                with contextlib.suppress(RuntimeError):
                    spare = torch.zeros(1)
                    work = group.recv([spare], peer, _SPARE_TAG)
                    self._spare.append((spare, work))  # gloo may write to it until it has noticed
                    work.wait(datetime.timedelta(milliseconds=1))

    def _answer_failed(self) -> None:
        self._failed = False
        with contextlib.suppress(RuntimeError):  # the store's host may be what has failed
            if self._store.check(["verdict"]):
                self._take_verdict()
                self._end_waits()  # what else is under way never ends
        self._looked.set()

    def _warn(self, waited_s: float) -> None:
        uses = [_parsed(text) for text in self._said()]
        _logger.warning(
            "rank %d of a sharded model has waited %.0f s: %s. A model that one rank runs alone, "
            "say to validate, waits for ever: run it on all ranks or on none",
            self._rank,
            waited_s,
            standing(uses),
        )


def _parsed(text: str | None) -> RankUses | None:
    return None if text is None else _of(*json.loads(text)[1:])


def _of(gathers: Any, exchanges: Any, agreements: int, waits: Any) -> RankUses:
    return RankUses(tuple(gathers), tuple(exchanges), agreements, waits and tuple(waits))


def _divergent(verdict: str) -> DivergentUseError:
    return DivergentUseError(
        f"expected all ranks to use the same units of a ZeRO-3 model in the same order, but "
        f"{verdict}. Run the same modules on every rank, or pass ranks_may_differ=True to "
        "fully_shard; start anew, since messages of this process group are left over"
    )


def make_watch(ranks: ModelRanks, *, frees_parameters: bool) -> Watch | None:
    """A watch where ranks could wait for different units: at ZeRO-3 (a collective). Counts the
    models of the group.
    """
    group = ranks.together.groups.group
    if group is not None:
        ranks.together.uses.of_model(next(_NUMBERS.setdefault(group, itertools.count())))
    if not frees_parameters or group is None or ranks.together.world_size == 1:
        return None
    store = store_of(group)
    return None if store is None else Watch(ranks, store)
