"""Machines with streams on a CPU (`bench/virtual_streams.py`) for tests.

machine    operators              what it is for
Machine    run at once            the bits that are right
Racing     run at once            names accesses that nothing orders (`race_detector.py`)
Late       run once a value of    a missing wait gives other bits. `side_first`: side streams
           theirs is asked for    overtake the compute stream; else they fall behind it
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from sidestream.bench.virtual_streams import Machine, Stream


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
