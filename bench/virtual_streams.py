"""CUDA streams on a CPU, and ranks that are not there: every operator goes to the current stream,
and only waits order streams.

An operator is an ATen call, as autograd and the optimizer make them, seen below autograd. A stream
counts its operators; a clock says of every stream how many of them have certainly ended. `Machine`
runs them at once; what derives from it runs them later, finds hazards, or gives them time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict["Stream", int]
"""Operators of each stream that have certainly ended."""


def join(clock: Clock, other: Clock) -> None:
    """Move `clock` to where it knows of all that `other` knows."""
    for stream, count in other.items():
        clock[stream] = max(count, clock.get(stream, 0))


class Stream:
    """In place of `torch.cuda.Stream`, with the methods that `StreamLane` uses. Clocks are events.

    Tests take single waits away by replacing `wait_stream` or `record_event` of one stream.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.clock: Clock = {self: 0}
        self.queue: list[tuple[Clock, Callable[[], object]]] = []
        self.num_run = 0

    def record_event(self) -> Clock:
        """What has certainly ended once the stream is here."""
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        """What follows comes after `event`."""
        join(self.clock, event)

    def wait_stream(self, other: Stream) -> None:
        """What follows comes after all that `other` has."""
        join(self.clock, other.clock)


class Machine(TorchDispatchMode):
    """The compute stream, the streams made since, and which one is current."""

    def __init__(self, stream_type: Callable[[], Stream] = Stream) -> None:
        super().__init__()
        self._stream_type = stream_type
        self.current = stream_type()
        self.streams = [self.current]

    def new_stream(self, *_: object, **__: object) -> Stream:
        """In place of `torch.cuda.Stream(...)`."""
        self.streams.append(self._stream_type())
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """In place of `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the fakes in place of `torch.cuda`'s, and `resize` before storages change."""
        original = torch.UntypedStorage.resize_
        with (
            mock.patch.multiple(
                torch.cuda,
                Stream=self.new_stream,
                stream=self.on,
                current_stream=lambda _device: self.current,
            ),
            mock.patch.object(
                torch.UntypedStorage, "resize_", lambda *args: self.resize(original, *args)
            ),
        ):
            yield

    def resize(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        """A storage changes its size, as by `original(storage, size)`."""
        return original(storage, size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func._schema.name in ("aten::set_", "aten::lift_fresh"):
            return func(*args, **kwargs)
        return self.launch(func, args, kwargs)

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, which reads or writes memory, on the current stream."""
        return func(*args, **kwargs)

    def transfer(self, group: LoopbackGroup, kind: str, target: Tensor, part: Tensor) -> None:
        """Bring `part` to every rank's place in `target`, on the current stream."""
        for own in target.chunk(group.world_size):
            if own.data_ptr() != part.data_ptr():
                own.copy_(part)

    def synchronize(self) -> None:
        """The host waits for the current stream."""


class LoopbackGroup:
    """A process group whose collectives run in the current stream, as NCCL's do when asked to;
    every rank holds what this one holds.
    """

    _device_types = ()  # nothing that has a time limit

    def __init__(self, machine: Machine, world_size: int) -> None:
        self._machine = machine
        self.world_size = world_size
        self.options: list[Any] = []
        """What each collective was given."""

    def size(self) -> int:
        """How many ranks there are."""
        return self.world_size

    def all_gather_single(self, flat: Tensor, source: Tensor, options: Any) -> None:
        """Bring every rank's `source` into `flat`."""
        self.options.append(options)
        self._machine.transfer(self, "gather", flat, source)

    _allgather_base = all_gather_single

    def alltoall_base(self, received: Tensor, sent: Tensor, _: Any, __: Any, options: Any) -> None:
        """Bring what every rank has for us into `received`."""
        self.options.append(options)
        part = sent.chunk(self.world_size)[0]
        self._machine.transfer(self, "exchange", received, part)
