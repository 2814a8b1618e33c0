"""CUDA graphs on a CPU: a machine with fake streams that records, and replays what it has recorded.

    outside of a recording    operators run at once
    while one goes on         operators on streams that take part are kept; none runs. New memory is
                              the graph's own, also what a storage grows into
    a replay                  runs them, each stream in order and behind what its clock has

As CUDA, it refuses: a stream that does not come back to the one that records, a wait for what is
not recorded, a question to an event or a value asked for by the host, and work on a stream that
takes no part, such as the default one. From then on all else in the recording is refused too, and
its events may never be waited for. A replay that would use memory which has gone since raises.

As torch's allocators, it refuses a pool of memory that had graphs and has none now, and one in
which a recording was refused: that of pinned memory is never told that it has ended.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from sidestream.bench.virtual_streams import Clock, Machine, Stream, join
from sidestream.tests.sharding.fake_streams import _shape_of

ASKED = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")


class CaptureRefused(RuntimeError):
    """As torch.AcceleratorError, which is a RuntimeError. `graph`: what it spoils."""

    def __init__(self, message: str, graph: "Graph | None" = None) -> None:
        super().__init__(message)
        if graph is not None:
            graph.is_spoiled = True


class Event(dict[Stream, int]):
    """A clock, and the recording in which it was taken."""

    graph: "Graph | None" = None

    def query(self) -> bool:
        if self.graph is not None:
            raise CaptureRefused("operation not permitted on an event last recorded in a capture")
        return True

    synchronize = query


class GraphStream(Stream):
    """Takes part in a recording from its first wait for one that does."""

    machine: "Recording"

    def __init__(self) -> None:
        super().__init__()
        self.graph: Graph | None = None

    def record_event(self) -> Clock:
        self.require_unspoiled()
        event = Event(self.clock)
        event.graph = self.graph
        return event

    def wait_event(self, event: Clock) -> None:
        self.require_unspoiled()
        other = event.graph if isinstance(event, Event) else None
        if other is not None and other.has_ended:
            raise CaptureRefused("wait for an event of a recording that has ended")
        if other is None and self.graph is not None:
            message = "isolation: a recorded stream waits for what is not recorded"
            raise CaptureRefused(message, self.graph)
        if other is not None and self.graph is None:
            self.graph = other
            other.streams.append(self)
        join(self.clock, event)
        if self.graph is not None and self is not self.graph.streams[0]:
            self.clock[self] += 1  # to be joined after this, though it may be given nothing to do

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.graph is not None:
            raise CaptureRefused("operation not permitted when stream is capturing", self.graph)

    def require_unspoiled(self) -> None:
        if self.graph is not None and self.graph.is_spoiled:
            raise CaptureRefused("operation failed due to a previous error during capture")


@dataclass(eq=False)
class Operation:
    """What one operator does, once all that its clock has is done."""

    stream: Stream
    position: int
    clock: Clock
    run: Callable[[], object]


@dataclass(eq=False)
class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    machine: "Recording"
    streams: list[GraphStream] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    own: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    generators: list[torch.Generator] = field(default_factory=list)
    pool: Any = None
    has_ended: bool = False
    is_spoiled: bool = False
    num_replays: int = 0
    counts: bool = False
    """Among the graphs of its pool."""

    def owned(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """`storage`, which is the graph's own memory."""
        self.own[storage._cdata] = storage
        return storage

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = self.machine.current
        assert isinstance(stream, GraphStream)
        if stream is self.machine.streams[0]:
            raise CaptureRefused("CUDA graphs must be captured on a non-default stream")
        assert self.machine.graph is None and capture_error_mode == "thread_local"
        pools = self.machine.num_graphs_of
        if pools.get(pool) == 0 or pool in self.machine.recorded_into:
            raise CaptureRefused(f"pool {pool}: has no graphs any more, or is recorded into")
        pools[pool] = pools.get(pool, 0) + 1
        self.machine.recorded_into.add(pool)
        self.pool, self.machine.graph = pool, self
        stream.graph = self
        self.streams.append(stream)

    def capture_end(self) -> None:
        if not self.streams:
            raise CaptureRefused("capture must end on the stream on which it began")
        machine, origin = self.machine, self.streams[0]
        unjoined = [
            machine.streams.index(stream)
            for stream in self.streams[1:]
            if origin.clock.get(stream, 0) < stream.clock[stream]
        ]
        self.has_ended, machine.graph = True, None
        for stream in self.streams:
            stream.graph = None
        machine.shadows.clear()
        if self.is_spoiled:
            raise CaptureRefused("the recording was spoiled by an earlier error")
        if unjoined:
            raise CaptureRefused(f"unjoined work: streams {unjoined} do not end before the graph")
        machine.recorded_into.remove(self.pool)
        self.counts = True

    def replay(self) -> None:
        assert self.has_ended
        self.num_replays += 1
        by_stream: dict[Stream, list[Operation]] = {}
        for operation in self.operations:
            by_stream.setdefault(operation.stream, []).append(operation)
        num_run = dict.fromkeys(by_stream, 0)

        def run(stream: Stream, last: int) -> None:
            """What `stream` has up to position `last`."""
            own = by_stream[stream]
            while num_run[stream] < len(own) and own[num_run[stream]].position <= last:
                operation = own[num_run[stream]]
                for other, needed in operation.clock.items():
                    if other is not stream and other in by_stream:
                        run(other, needed)
                operation.run()
                num_run[stream] += 1

        with torch._C._AutoDispatchBelowADInplaceOrView():
            for stream in reversed(by_stream):  # side streams as early as their clocks allow
                run(stream, by_stream[stream][-1].position)

    def reset(self) -> None:
        self.operations.clear()
        self.own.clear()
        if self.counts:
            self.machine.num_graphs_of[self.pool] -= 1
        self.counts = False


class Recording(Machine):
    """Runs at once, or records. `graphs`: all that were made."""

    def __init__(self) -> None:
        super().__init__(GraphStream)
        self.graph: Graph | None = None
        self.graphs: list[Graph] = []
        self.shadows: dict[int, torch.UntypedStorage] = {}
        self.num_graphs_of: dict[object, int] = {}
        self.recorded_into: set[object] = set()

    def new_graph(self) -> Graph:
        self.graphs.append(Graph(self))
        return self.graphs[-1]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with (
            super().installed(),
            mock.patch.multiple(
                torch.cuda,
                CUDAGraph=self.new_graph,
                graph_pool_handle=object,
                synchronize=lambda _device: None,
                empty_cache=lambda: None,
            ),
            # The allocator of torch built with CUDA, which the machine's GPU has no part in.
            mock.patch.multiple(
                torch._C,
                create=True,
                _cuda_endAllocateToPool=lambda *_: None,
                _cuda_releasePool=lambda *_: None,
            ),
        ):
            yield

    def resize(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        self.shadows.pop(storage._cdata, None)
        if self.graph is None:
            return original(storage, size)
        if size:
            # The same block at each replay, whatever the storage has by then.
            self.shadows[storage._cdata] = self.graph.owned(torch.UntypedStorage(size).fill_(0xFF))
        return inspect.unwrap(original)(storage, size)

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph, stream = self.graph, self.current
        if graph is None:
            return func(*args, **kwargs)
        assert isinstance(stream, GraphStream)
        if stream.graph is not graph:
            raise CaptureRefused(f"{func} on a stream that takes no part in the recording", graph)
        stream.require_unspoiled()
        if func._schema.name in ASKED:
            raise CaptureRefused(f"{func} makes the host wait for a value", graph)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return self._fresh(graph, func, args, kwargs)
        stream.clock[stream] += 1
        if func._schema.is_mutable:
            self._keep(graph, func, args, kwargs, None)
            return args[0] if func._schema.returns else None
        on_meta = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
        shapes = func(
            *tree_map_only(Tensor, _shape_of, args),
            **{**tree_map_only(Tensor, _shape_of, kwargs), **on_meta},
        )
        outputs = tree_map_only(Tensor, lambda one: self._new(graph, one), shapes)
        self._keep(graph, func, args, kwargs, outputs)
        return outputs

    def _fresh(self, graph: Graph, func: Any, args: Any, kwargs: Any) -> Any:
        """What needs no other tensor: memory, and perhaps a kernel that fills it."""
        outputs = func(*args, **kwargs)
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                graph.owned(leaf.untyped_storage())
        if "empty" not in func._schema.name:
            self.current.clock[self.current] += 1
            self._keep(graph, func, args, kwargs, outputs)
        return outputs

    def _new(self, graph: Graph, shape: Tensor) -> Tensor:
        output = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        graph.owned(output.untyped_storage())
        return output

    def _keep(self, graph: Graph, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        inputs, results = [
            tree_map_only(Tensor, lambda tensor: self._place(tensor, graph), value)
            for value in ((args, kwargs), outputs)
        ]

        def run() -> None:
            given, wanted = [tree_map_only(_Place, _Place.tensor, one) for one in (inputs, results)]
            found = func(*given[0], **given[1])
            if wanted is not None:
                for output, result in zip(tree_leaves(wanted), tree_leaves(found), strict=True):
                    if isinstance(output, Tensor):
                        output.copy_(result)

        stream = self.current
        clock = dict(stream.clock)
        graph.operations.append(Operation(stream, clock[stream], clock, run))

    def _place(self, tensor: Tensor, graph: Graph) -> "_Place":
        storage = tensor.untyped_storage()
        kept = self.shadows.get(storage._cdata, graph.own.get(storage._cdata))
        address = StorageWeakRef(storage) if kept is None else kept
        shape = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        return _Place(address, storage.nbytes(), *shape)


@dataclass(frozen=True)
class _Place:
    """A tensor as a kernel's argument: an address, and what lies there."""

    address: Any
    nbytes: int
    shape: Any
    stride: Any
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        storage = self.address
        if isinstance(storage, StorageWeakRef):
            storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
            if storage is None or storage.nbytes() != self.nbytes:
                raise CaptureRefused("a replay uses memory that has gone since it was recorded")
        flat = torch.tensor([], dtype=self.dtype)
        return flat.set_(storage, self.offset, self.shape, self.stride)
