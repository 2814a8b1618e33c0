"""The one place where storage is allocated, resized and given back, with an exact count of its
bytes.

On a GPU, memory belongs to the stream that is current when it is allocated, so a caller enters its
lane's stream first; the caching allocator then hands it back to work on that same stream only. What
another stream reads must be kept referenced until that stream has passed its last read, and the
owner must know of it before the memory is freed, lest it be unmapped too early (see
`sharding.lanes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

_Size = tuple[int, torch.dtype]


class Streams(Protocol):
    """What a pool has to know of the streams that own its memory."""

    def current(self) -> Hashable:
        """That which owns what is allocated now."""

    def catch_up(self) -> None:
        """Called before memory is freed: its owner is to wait for all that uses it."""


@dataclass(slots=True)
class BufferPool:
    """Leases flat buffers on `device`, and counts every byte.

    A released buffer is handed out again to the next lease of its size on the same stream; its
    memory is freed by `trim` or by the first lease of another size there: units of one shape take
    turns with the same memory, and what a stream keeps never exceeds what it had leased at once.
    The tensor itself stays, so that `views` of it are made once. What `allocate` makes has one
    owner for good: whoever refers to it may go on reading after `forget`. `live_bytes` counts all
    memory held now, `peak_bytes` the most it ever was since `reset_peak`. To be called from one
    thread.
    """

    device: torch.device
    streams: Streams | None = None
    """None on a CPU."""
    live_bytes: int = 0
    peak_bytes: int = 0
    # Strong references: an id must not come back as another tensor's.
    _leased: dict[int, tuple[_Size, Tensor]] = field(default_factory=dict)
    # By the stream that was current then.
    _released: dict[Hashable, dict[_Size, list[Tensor]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    _trimmed: dict[_Size, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _views: dict[int, dict[Hashable, list[Tensor]]] = field(default_factory=dict)

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor [numel] with any contents, until `release`."""
        size = (numel, dtype)
        stream = None if self.streams is None else self.streams.current()
        if released := self._released[stream][size]:
            tensor = released.pop()
        else:
            self._trim([stream])
            if trimmed := self._trimmed[size]:
                tensor = trimmed[-1]
                self.grow(tensor.untyped_storage(), numel * dtype.itemsize)
                trimmed.pop()
            else:
                tensor = self._new(numel, dtype)
        self._leased[id(tensor)] = size, tensor
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Give a leased tensor back; the caller must not use it any more.

        Raises:
            RuntimeError: `tensor` is not on lease (a double release, or another pool's).
        """
        size = self._take_back(tensor, "release")
        stream = None if self.streams is None else self.streams.current()
        self._released[stream][size].append(tensor)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor [numel] with any contents, never handed out again, until `forget`."""
        tensor = self._new(numel, dtype)
        self._leased[id(tensor)] = (numel, dtype), tensor
        return tensor

    def forget(self, tensor: Tensor) -> None:
        """Let go of what `allocate` made: its memory lives as long as somebody refers to it.

        Raises:
            RuntimeError: as `release`.
        """
        self._take_back(tensor, "forget")
        if self.streams is not None:
            self.streams.catch_up()
        self.live_bytes -= tensor.untyped_storage().nbytes()

    def lose(self, tensor: Tensor) -> None:
        """Let go of a lease that nobody may get next, since something may still write to it; raises
        as `release` does.
        """
        self.forget(tensor)
        self._views.pop(id(tensor), None)  # or its memory would live on, for another tensor's id

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        self._count(tensor.untyped_storage().nbytes())
        return tensor

    def _take_back(self, tensor: Tensor, caller: str) -> _Size:
        size, _ = self._leased.pop(id(tensor), (None, None))
        if size is None:
            raise RuntimeError(
                f"{caller}: expected a tensor leased from this pool, got one of {tensor.numel()} "
                f"elements that is not on lease; {caller} each lease once"
            )
        return size

    def views(
        self, tensor: Tensor, key: Hashable, make: Callable[[Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """`make(tensor)` for a leased tensor, made once per `key`; the views outlive the lease."""
        known = self._views.setdefault(id(tensor), {})
        views = known.get(key)
        if views is None:
            views = known[key] = make(tensor)
        return views

    def count_beside(self, nbytes: int) -> None:
        """Count memory that is held for good and was allocated elsewhere."""
        self._count(nbytes)

    def trim(self) -> None:
        """Free the memory of every buffer that is not on lease."""
        self._trim(list(self._released))

    def _trim(self, streams: Sequence[Hashable]) -> None:
        released = [item for stream in streams for item in self._released.pop(stream).items()]
        if self.streams is not None and any(tensors for _, tensors in released):
            self.streams.catch_up()
        for size, tensors in released:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                self._free(storage, storage.nbytes())
            self._trimmed[size] += tensors

    def grow(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give an empty `storage` memory (contents uninitialised); tensors over it become valid."""
        storage.resize_(nbytes)
        self._count(nbytes)

    def shrink(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the `nbytes` of `storage`; tensors over it are valid again after `grow`."""
        if self.streams is not None:
            self.streams.catch_up()
        self._free(storage, nbytes)

    def _free(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(0)
        self.live_bytes -= nbytes

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        self.peak_bytes = self.live_bytes

    def _count(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
