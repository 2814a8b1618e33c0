"""Forward, backward and exchange of all microbatches of a step as one CUDA graph.

    def step(batches):
        for batch in batches[:-1]:
            with ss.no_sync(model):
                loss_of(model, batch).backward()
        loss = loss_of(model, batches[-1])
        loss.backward()
        return loss

    graphed = FullStepGraph(step, [model])
    for batches in data:
        loss = graphed(batches)
        optimizer.step()
        optimizer.zero_grad()

    call of one key      1 .. warmup_steps    the next one             all others
    runs                 the step as it is    recorded, then replayed  replayed

A key is all that a graph cannot change: shapes, dtypes and strides of inputs, values that are no
tensors, whether gradients are made and modules train, autocast. A value that differs in each step,
such as its number, has to be a tensor. All ranks do the same in one call: what the one does that is
least far, which their hosts agree on by an all-reduce of eight bytes.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...sharding.arguments import require_count, require_one_of
from ...sharding.modules.structures import map_tensors
from .arguments import (
    device_of,
    numbered,
    recorder_of,
    require_generators,
    require_modules,
    require_step,
)
from .recording import CaptureError, Part, generators_kept, record
from .static_inputs import buffers_like, fill, key_of, on_device, tensors_of, with_tensors

_logger = logging.getLogger("sidestream")
FAILURES = RAISE, EAGER = "raise", "eager"
_TOLD_AT = 16
"""So many steps that no graph came of are no chance."""
_MODES = ("global", "thread_local", "relaxed")


class _Way(enum.IntEnum):
    """What a call does, the least far first."""

    EAGERLY = 0
    RECORD = 1
    REPLAY = 2


@dataclass(eq=False, slots=True)
class _Graph:
    """A graph, the buffers that it reads, what it returns and what it does to the models."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any
    parts: list[Part]


@dataclass(eq=False, slots=True)
class _Entry:
    """What is known of one key."""

    eager_steps: int = 0
    has_failed: bool = False
    graph: _Graph | None = None

    def way(self, warmup_steps: int) -> _Way:
        if self.graph is not None:
            return _Way.REPLAY
        warms_up = self.has_failed or self.eager_steps < warmup_steps
        return _Way.EAGERLY if warms_up else _Way.RECORD


class FullStepGraph:
    """`step`, called as it is, but replayed from a CUDA graph once it is known. On a CPU it always
    runs as it is, and a line of the log says so; inputs and gradients that no graph can take are
    refused there too.

    A replay has the bits of the step, of its random numbers too. The step has to start with cleared
    gradients (`zero_grad(set_to_none=True)`), to end with a backward outside `no_sync` if it has
    any, and to leave the optimizer's step, clipping and logging to the caller. Its Python code runs
    in eager calls and while it is recorded, never in a replay: what it counts or prints there, and
    random numbers of the host, are those of the recording.

    Args:
        step: takes and returns tensors, plain values, and dicts, lists, tuples and dataclasses of
            such. Inputs that are tensors reach it as copies on `device`; pinned memory must stay as
            it is until its copy has ended. What it returns comes back detached. Of packed documents
            it takes tokens, targets and offsets, filled up to one length with empty documents, and
            makes their `PackedSeqParams` itself.
        modules: all models of which the step makes gradients, sharded ones as they were passed to
            `fully_shard`.
        generators: of random numbers on the GPU that it uses, beside the default one.
        warmup_steps: how many calls of a new key run as they are: at least one.
        max_graphs: how many keys are kept; the least recently used one goes. They share memory.
        clone_outputs: whether what comes back is a copy. Else it is the graph's own memory, which
            the next call of any key may overwrite.
        on_failure: when a step cannot be recorded: 'raise' (once; its key runs as it is from then
            on), or 'eager': go on without a graph for its key, and say so once.
        device: None: that of the first parameter.
        capture_error_mode: torch's, see `torch.cuda.graph`. With 'global' NCCL's watchdog may spoil
            a recording.

    Raises:
        TypeError, ValueError: an argument that is none of these.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        modules: Sequence[nn.Module],
        *,
        generators: Sequence[torch.Generator] = (),
        warmup_steps: int = 2,
        max_graphs: int = 4,
        clone_outputs: bool = True,
        on_failure: str = RAISE,
        device: torch.device | str | None = None,
        capture_error_mode: str = "thread_local",
    ) -> None:
        require_step(step)
        require_modules(modules)
        require_count("warmup_steps", warmup_steps)
        require_count("max_graphs", max_graphs)
        require_one_of("on_failure", on_failure, FAILURES)
        require_one_of("capture_error_mode", capture_error_mode, _MODES)
        self._step = step
        self._parts_of_modules = [part for module in modules for part in module.modules()]
        self._recorders = [recorder_of(module) for module in modules]
        self._warmup_steps, self._max_graphs = warmup_steps, max_graphs
        self._clones, self._on_failure = clone_outputs, on_failure
        self._error_mode = capture_error_mode
        self.device = numbered(device_of(modules) if device is None else torch.device(device))
        """Where the step runs."""
        self._generators = tuple(generators)
        require_generators(self._generators, self.device)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._num_given_up = 0
        self.captures = can_capture(self.device)
        """Whether calls are replayed from graphs: on a GPU alone."""
        if self.captures:
            self._run = FullStepGraph._run_graphs  # no bound method: it would be a cycle
            self._stream = torch.cuda.Stream(self.device)
            self._pool: Any = None
            self._last = torch.cuda.current_stream(self.device)
        else:
            self._run = FullStepGraph._run_as_it_is
            _logger.info("FullStepGraph: steps run eagerly, without a graph, on %s", self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step.

        Raises:
            CaptureError: it cannot be recorded. Nothing has run then, and gradients are cleared.
            RuntimeError: gradients were not cleared.
            TypeError, ValueError: an input that no graph can take.
            CommunicationError: a rank is gone.
        """
        return self._run(self, args, kwargs)

    @property
    def num_graphs(self) -> int:
        """How many graphs are kept."""
        return sum(entry.graph is not None for entry in self._entries.values())

    def reset(self) -> None:
        """Forget all graphs, and what is known of their keys: for all ranks to call, after a change
        of the modules other than of values.
        """
        for entry in self._entries.values():
            self._drop(entry)
        self._entries.clear()

    # ---- ways

    def _run_as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key_of((args, kwargs))
        self._require_cleared()
        return map_tensors(Tensor.detach, self._step(*args, **kwargs))

    def _run_graphs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = (args, kwargs)
        key = key_of(inputs), self._state()
        self._require_cleared()
        self._follow_stream()
        entry = self._entry(key)
        way = _Way(self._least(entry.way(self._warmup_steps)))
        if way is _Way.EAGERLY:
            return self._eagerly(entry, inputs)
        if way is _Way.RECORD and not self._record(entry, inputs):
            return self._eagerly(entry, inputs)
        assert entry.graph is not None
        return self._replay(entry.graph, inputs)

    def _eagerly(self, entry: _Entry, inputs: Any) -> Any:
        entry.eager_steps += 1
        args, kwargs = on_device(inputs, self.device)
        current = torch.cuda.current_stream(self.device)
        # On the stream that records later: autograd runs backward where forward ran, and keeps
        # what accumulates gradients as long as somebody holds an output.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self._step(*args, **kwargs)
        current.wait_stream(self._stream)
        return map_tensors(lambda tensor: _handed_over(tensor, current), outputs)

    def _replay(self, kept: _Graph, inputs: Any) -> Any:
        for part in kept.parts:
            part.before_replay()
        fill(kept.inputs, tensors_of(inputs))
        kept.graph.replay()
        for part in kept.parts:
            part.after_replay()
        return map_tensors(Tensor.clone, kept.outputs) if self._clones else kept.outputs

    def _record(self, entry: _Entry, inputs: Any) -> bool:
        """Whether `entry` has a new graph."""
        self._drop(entry)
        entry.has_failed = True  # unless it ends well
        error, graph = self._refused(), None
        if self._least(error is None):
            try:
                graph = self._recorded(inputs)
            except CaptureError as caught:
                error = caught.with_traceback(None)  # which holds this frame, and so the models
            if self._least(error is None) and graph is not None:
                entry.graph = graph  # `reset` forgets it where ranks differ
                for recorder in self._recorders:
                    recorder.compare()
                entry.has_failed = False
                return True
        if graph is not None:
            self._forget(graph)
        if error is None:
            error = CaptureError("a step's CUDA graph: another rank could not record it, see there")
        if self._on_failure == RAISE:
            raise error
        _logger.warning("FullStepGraph: steps like this one go on without a graph: %s", str(error))
        return False

    def _recorded(self, inputs: Any) -> _Graph:
        tensors = tensors_of(inputs)
        buffers = buffers_like(tensors, self.device)
        args, kwargs = with_tensors(inputs, buffers)
        if self._pool is None or not self.num_graphs:
            # The allocators take none that had graphs and has none now.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        for recorder in self._recorders:
            recorder.begin()
        try:
            with generators_kept(self.device, self._generators):
                outputs = record(
                    lambda: map_tensors(Tensor.detach, self._step(*args, **kwargs)),
                    self._recorders,
                    graph,
                    device=self.device,
                    stream=self._stream,
                    pool=self._pool,
                    error_mode=self._error_mode,
                )
                parts = self._parts()
        except BaseException:
            self._pool = None  # spoiled for other recordings, see `record`
            for recorder in self._recorders:
                recorder.fail()
            raise
        return _Graph(graph, buffers, outputs, parts)

    def _parts(self) -> list[Part]:
        try:
            return [recorder.end() for recorder in self._recorders]
        except RuntimeError as error:
            raise CaptureError(str(error)) from error

    # ---- what is known

    def _state(self) -> Hashable:
        autocast = torch.is_autocast_enabled(self.device.type)
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast and torch.get_autocast_dtype(self.device.type),
            *(part.training for part in self._parts_of_modules),
        )

    def _entry(self, key: Hashable) -> _Entry:
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_graphs:
            _, oldest = self._entries.popitem(last=False)
            self._drop(oldest)
            self._num_given_up += 0 < oldest.eager_steps < self._warmup_steps
            if self._num_given_up == _TOLD_AT:
                _logger.warning(
                    "FullStepGraph: %d kinds of steps went before they came often enough to be "
                    "recorded: pass what changes from step to step as tensors, or max_graphs for "
                    "as many shapes and plain values as there are",
                    _TOLD_AT,
                )
        return entry

    def _least(self, value: int) -> int:
        for recorder in self._recorders:
            value = recorder.least(int(value))
        return value

    def _require_cleared(self) -> None:
        for recorder in self._recorders:
            if names := recorder.kept_gradients():
                raise RuntimeError(
                    "FullStepGraph: expected cleared gradients before a step, which writes them "
                    f"anew, got some of '{names[0]}'; call optimizer.zero_grad(), with "
                    "set_to_none=True, after each optimizer.step()"
                )

    def _refused(self) -> CaptureError | None:
        reasons = [reason for recorder in self._recorders for reason in recorder.reasons()]
        if torch.is_autocast_enabled(self.device.type) and torch.is_autocast_cache_enabled():
            reasons.append(
                "autocast around the step keeps casts of weights from one call to the next; open "
                "it inside the step, or with cache_enabled=False"
            )
        if not reasons:
            return None
        return CaptureError(f"a step's CUDA graph: it cannot be recorded: {'; '.join(reasons)}")

    def _follow_stream(self) -> None:
        """Calls on different streams follow each other: all use the same buffers."""
        current = torch.cuda.current_stream(self.device)
        if current != self._last:
            current.wait_stream(self._last)
            self._last = current

    def _forget(self, kept: _Graph) -> None:
        """It has never run, and is not going to."""
        for part in kept.parts:
            part.drop()
        for recorder in self._recorders:
            recorder.fail()
        kept.graph.reset()

    def _drop(self, entry: _Entry) -> None:
        if entry.graph is not None:
            torch.cuda.synchronize(self.device)  # it may run
            for part in entry.graph.parts:
                part.drop()
            entry.graph.graph.reset()
            entry.graph = None

    def __del__(self) -> None:
        # Models live on, and their gradients may be freed again.
        for entry in getattr(self, "_entries", {}).values():
            for part in entry.graph.parts if entry.graph is not None else ():
                part.drop()


def can_capture(device: torch.device) -> bool:
    """Whether steps on `device` can be recorded."""
    return device.type == "cuda"


def _handed_over(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor.detach()
