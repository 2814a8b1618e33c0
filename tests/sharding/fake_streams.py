"""CUDA streams on a CPU: every operator goes to the current stream, and only waits order streams.

    machine    operators              what it is for
    Machine    run at once            the bits that are right
    Racing     run at once            names accesses that nothing orders (`race_detector.py`)
    Late       run once a value of    a missing wait gives other bits. `side_first`: side streams
               theirs is asked for    overtake the compute stream; else they fall behind it

An operator is an ATen call, as autograd and the optimizer make them, seen below autograd. A stream
counts its operators; a clock says of every stream how many of them have certainly ended.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Clock = dict["Stream", int]


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
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        join(self.clock, event)

    def wait_stream(self, other: "Stream") -> None:
        join(self.clock, other.clock)


class Machine(TorchDispatchMode):
    """The compute stream, the streams made since, and which one is current."""

    def __init__(self, stream_type: Callable[[], Stream] = Stream) -> None:
        super().__init__()
        self._stream_type = stream_type
        self.current = stream_type()
        self.streams = [self.current]

    def new_stream(self, *_: object, **__: object) -> Stream:
        self.streams.append(self._stream_type())
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
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

    def transfer(self, group: "LoopbackGroup", kind: str, target: Tensor, part: Tensor) -> None:
        """Bring `part` to every rank's place in `target`, on the current stream."""
        for own in target.chunk(group.world_size):
            if own.data_ptr() != part.data_ptr():
                own.copy_(part)

    def synchronize(self) -> None:
        """The host waits for the current stream."""


class Late(Machine):
    """Enqueues everything; what side streams hold runs first, or only once it is waited for."""

    def __init__(self, *, side_first: bool) -> None:
        super().__init__()
        self._side_first = side_first

    def resize(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        """As if the allocator gave the same block back each time: operators on it are enqueued."""
        return storage

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::_local_scalar_dense":
            self.synchronize()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._enqueue(lambda: func(*args, **kwargs))
            return args[0] if func._schema.returns else None
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        on_meta = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
        shapes = func(
            *tree_map_only(Tensor, _shape_of, args),
            **{**tree_map_only(Tensor, _shape_of, kwargs), **on_meta},
        )
        outputs = tree_map_only(Tensor, lambda shape: torch.empty_like(shape, device="cpu"), shapes)

        def run() -> None:
            results = tree_leaves(func(*args, **kwargs))
            for output, result in zip(tree_leaves(outputs), results, strict=True):
                if isinstance(output, Tensor):
                    output.copy_(result)

        self._enqueue(run)
        return outputs

    def _enqueue(self, run: Callable[[], object]) -> None:
        clock = self.current.clock
        clock[self.current] += 1
        self.current.queue.append((dict(clock), run))

    def synchronize(self) -> None:
        order = [*self.streams[1:], self.current] if self._side_first else [self.current]
        # Autograd has seen these operators when they were enqueued.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            for stream in order:
                self._run(stream, len(stream.queue))

    def _run(self, stream: Stream, count: int) -> None:
        while stream.num_run < count:
            clock, run = stream.queue[stream.num_run]
            for other, needed in clock.items():
                if other is not stream:
                    self._run(other, needed)
            run()
            stream.num_run += 1


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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
        return self.world_size

    def all_gather_single(self, flat: Tensor, source: Tensor, options: Any) -> None:
        self.options.append(options)
        self._machine.transfer(self, "gather", flat, source)

    _allgather_base = all_gather_single

    def alltoall_base(self, received: Tensor, sent: Tensor, _: Any, __: Any, options: Any) -> None:
        self.options.append(options)
        part = sent.chunk(self.world_size)[0]
        self._machine.transfer(self, "exchange", received, part)
