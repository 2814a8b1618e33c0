"""The save that a thread carries on while training goes on: at most one in a process.

    save_checkpoint(asynchronous=True)   refuses, copies, makes the folder; then the thread writes
    the next save, a load                wait for it
    the interpreter's exit               waits for it: the thread is no daemon

The thread talks over a group that is used for nothing else, since operations of two threads on one
group could meet in another order on another rank.
"""

from __future__ import annotations

import atexit
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..tensor.sharded_tensor import ShardedTensor
from .plain_values import read_back

_logger = logging.getLogger("sidestream")


class _Saving(Future[None]):
    """The save of `path`; remembers whether anybody has asked how it ended."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._was_asked = False
        self.set_running_or_notify_cancel()  # what other ranks take part in cannot be cancelled

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end, and raise what went wrong."""
        self.exception(timeout)
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return what went wrong."""
        error = super().exception(timeout)
        self._was_asked = True
        return error

    def lost_error(self) -> BaseException | None:
        """What went wrong, if nobody has asked; from now on somebody has."""
        return None if self._was_asked else self.exception()


_under_way: list[_Saving] = []
"""The latest save, until the next one begins."""


def start(write: Callable[[], None], path: str) -> Future[None]:
    """Have a thread call `write`, the save of `path`; no other one may be under way."""
    assert not _under_way, "the one before was not waited for"
    saving = _Saving(path)
    _under_way.append(saving)
    threading.Thread(target=_run, args=(saving, write), name=f"save {path}", daemon=False).start()
    return saving


def _run(saving: _Saving, write: Callable[[], None]) -> None:
    had_group = dist.is_initialized()
    try:
        write()
    except BaseException as error:  # noqa: BLE001 - whoever asks gets it
        if had_group and not dist.is_initialized():
            ended = RuntimeError(
                f"asynchronous save of {saving.path}: expected the process group to last, it was "
                "destroyed meanwhile, and nothing was saved; call result() of the future that "
                "save_checkpoint returned before destroy_process_group"
            )
            ended.__cause__, error = error, ended
        _free_frames(error)
        saving.set_exception(error)
    else:
        saving.set_result(None)


def _free_frames(error: BaseException | None) -> None:
    """Let go of the copied state, which the frames that `error` came through refer to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def wait_for_save() -> None:
    """Wait until no save is under way in this process."""
    wait(_under_way)


def end_save_before() -> None:
    """Wait for the save before this one.

    Raises:
        RuntimeError: it failed, and nobody has asked its future.
    """
    wait_for_save()
    while _under_way:
        ended = _under_way.pop()
        if (error := ended.lost_error()) is not None:
            raise RuntimeError(
                f"the asynchronous save of {ended.path}, before this one, failed, and nobody "
                f"asked: {error}. Nothing was saved this time either; call result() of the future "
                "that save_checkpoint returned, and save again"
            ) from error


@atexit.register
def _tell_of_lost_error() -> None:
    for ended in _under_way:
        if (error := ended.lost_error()) is not None:
            _logger.error(
                "the asynchronous save of %s failed, and nobody asked: %s; call result() of the "
                "future that save_checkpoint returned",
                ended.path,
                error,
            )


def copied(state: Any) -> Any:
    """A copy of the nested `state` on the CPU, which a step does not change.

    Values that are stored as pickles become what reading them back would give.
    """
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    if isinstance(state, ShardedTensor):
        return state.with_local(state.local.detach().to("cpu", copy=True))
    if isinstance(state, Tensor):
        # Other sharded kinds stay on their mesh's device.
        is_sharded = hasattr(state, "__create_write_items__")
        return state.detach().clone() if is_sharded else state.detach().to("cpu", copy=True)
    if state is None or type(state) in (bool, int, float, str):
        return state
    return read_back(state)
