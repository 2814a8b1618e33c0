"""One recording of a CUDA graph that leaves everything as it was where it fails."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class CaptureError(RuntimeError):
    """A step that was to be a CUDA graph cannot be one."""


class Part(Protocol):
    """What a graph does to the host's state of one model."""

    def before_replay(self) -> None:
        """The graph is enqueued next."""

    def after_replay(self) -> None:
        """It has been enqueued."""

    def drop(self) -> None:
        """It is gone."""


class Recorder(Protocol):
    """Records steps of one model: `sharding.capture.StepRecorder`, `PlainRecorder`."""

    def reasons(self) -> list[str]:
        """Why no step can be recorded now."""

    def kept_gradients(self) -> list[str]:
        """What has gradients already."""

    def least(self, value: int) -> int:
        """The least `value` of the ranks of the model."""

    def begin(self) -> None:
        """A recording begins next."""

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Where the current stream records."""

    def end(self) -> Part:
        """It has ended."""

    def compare(self) -> None:
        """All ranks' have."""

    def fail(self) -> None:
        """It has failed, here or on another rank."""


def record(
    step: Callable[[], T],
    recorders: Sequence[Recorder],
    graph: torch.cuda.CUDAGraph,
    *,
    device: torch.device,
    stream: torch.cuda.Stream,
    pool: Any,
    error_mode: str,
) -> T:
    """Record what `step` enqueues on `stream`, and on those of the models, in `graph`; what it
    returns comes back. Nothing runs.

    Raises:
        CaptureError: it cannot be recorded; the models are not told yet.
    """
    # torch before 2.14 spoils a recording by a graph that the collector happens to free in it.
    gc.collect()
    torch.cuda.synchronize(device)  # tables of addresses are there, and nothing is under way
    torch.cuda.empty_cache()  # the graph's memory is apart from what eager steps have taken
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            with contextlib.ExitStack() as insides:
                for recorder in recorders:
                    insides.enter_context(recorder.inside())
                outputs = step()
        except BaseException as error:
            # What ended it has mostly spoiled the recording: then this says so once more.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            _give_up(graph, device, pool)
            if isinstance(error, Exception):
                raise CaptureError(_told(error)) from error
            raise
        try:
            graph.capture_end()
        except RuntimeError as error:
            _give_up(graph, device, pool)
            raise CaptureError(_told(error)) from error
    return outputs


def _give_up(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Forget a recording that was refused. Its end does not tell the allocator, which frees nothing
    for others as long as it believes that one goes on, nor the memory of `pool` as long as it
    counts this graph; generators are told when the graph goes. The allocator of pinned memory
    cannot be told: no other recording may use `pool`.
    """
    graph.reset()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is not None and release is not None:
        with contextlib.suppress(RuntimeError):  # it was told, and `reset` has released
            end(device.index, pool)
            release(device.index, pool)


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = str(error).strip().partition("\n")[0]
    return (
        "a step's CUDA graph: expected a step that only enqueues work on the GPU, got "
        f"{type(error).__name__}: {first} (in {frame.name}, {frame.filename}:{frame.lineno}: "
        f"{frame.line}); keep what waits for the GPU, such as item(), out of the step, or run it "
        "without a graph"
    )


@contextlib.contextmanager
def generators_kept(device: torch.device, generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Generators are after a recording that fails what they were before it.

    torch 2.11 leaves them in the recording, where they give no numbers outside of it: then they get
    a state of its own. Graphs of other objects that draw from them go on with the old one.
    """
    every = [*generators]
    if device.type == "cuda":
        every.append(torch.cuda.default_generators[device.index])
    saved = [(generator, generator.clone_state()) for generator in every]
    try:
        yield
    except BaseException:
        for generator, state in saved:
            try:
                torch.empty(1, device=generator.device).uniform_(generator=generator)
                generator.set_state(state.get_state())
            except RuntimeError:
                generator.graphsafe_set_state(state)
        raise
