"""One thread of this process that speaks with the stores of process groups: they may answer late,
or never, where their host is stopped. What else has to go on does not wait for them.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from typing import Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_logger = logging.getLogger("sidestream")
GRACE_S = 3.0
"""For what a thread or another rank does with a store whose host may leave."""
_LOOK_S = 0.25


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """That in which the ranks of `group` have met; None where there is none, or the group was
    destroyed, and for torch's "fake" groups, whose other ranks say nothing.
    """
    world = getattr(c10d, "_world", None)  # private: without it nobody is asked
    backend, store = ("fake", None) if world is None else world.pg_map.get(group, ("fake", None))
    return None if backend == "fake" else store


class Looking(Protocol):
    """What is looked after. `look_s`: how often, in seconds; the least of all counts."""

    look_s: float

    def look(self) -> None:
        """Ask the store and answer. A RuntimeError says that it is gone: no further look."""


class StoreThread:
    """Looks after what is weakly known to it, as long as there is any."""

    def __init__(self) -> None:
        self._looking: weakref.WeakSet[Looking] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def watch(self, one: Looking) -> None:
        """Look after `one` until it goes."""
        with self._changed:
            self._looking.add(one)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="sidestream-store", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def wake(self) -> None:
        """Look now."""
        with self._changed:
            self._changed.notify()

    def end(self) -> None:
        """Join the thread: one that is inside a store would not survive the interpreter's end."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(GRACE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(min([_LOOK_S, *(one.look_s for one in self._looking)]))
                looking = list(self._looking)
                if self._is_ending or not looking:
                    self._thread = None
                    return
            while looking:
                one = looking.pop()
                try:
                    one.look()
                except RuntimeError as error:  # the store is gone, and with it whom to ask
                    _logger.debug("the ranks' store is not asked any more: %s", error)
                    with self._changed:
                        self._looking.discard(one)
                del one  # a model may go meanwhile


STORE_THREAD = StoreThread()
"""That of this process."""
atexit.register(STORE_THREAD.end)
