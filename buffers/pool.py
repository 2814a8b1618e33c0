"""The one place where storage is allocated, resized and given back, with an exact count of its
bytes.

On a GPU, memory belongs to the stream that is current when it is allocated, so a caller enters its
lane's stream first; the caching allocator then hands it back to work on that same stream only. What
another stream reads must be kept referenced until that stream has passed its last read (see
`sharding.lanes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class BufferPool:
    """Leases flat buffers on `device`.

    `live_bytes` counts what is leased or grown now, `peak_bytes` the most it ever was since
    `reset_peak`. `lease` and `release` must be called from one thread.
    """

    device: torch.device
    live_bytes: int = 0
    peak_bytes: int = 0
    _leased: set[int] = field(default_factory=set)

    def lease(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor [numel], uninitialised, until `release`."""
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        self._leased.add(id(tensor))
        self._count(tensor.untyped_storage().nbytes())
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Give a leased tensor back; its memory is free once the caller drops its last reference.

        Raises:
            RuntimeError: `tensor` is not on lease (a double release, or another pool's).
        """
        if id(tensor) not in self._leased:
            raise RuntimeError(
                f"release: expected a tensor leased from this pool, got one of {tensor.numel()} "
                "elements "
                "that is not on lease; release each lease once"
            )
        self._leased.remove(id(tensor))
        self.live_bytes -= tensor.untyped_storage().nbytes()

    def grow(self, flat: Tensor) -> None:
        """Give `flat`, whose storage is empty, its full storage (contents uninitialised)."""
        storage = flat.untyped_storage()
        assert storage.nbytes() == 0, "storage is already allocated"
        nbytes = flat.numel() * flat.element_size()
        storage.resize_(nbytes)
        self._count(nbytes)

    def shrink(self, flat: Tensor) -> None:
        """Free `flat`'s storage; views of it stay and become valid again after `grow`."""
        storage = flat.untyped_storage()
        self.live_bytes -= storage.nbytes()
        storage.resize_(0)

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        self.peak_bytes = self.live_bytes

    def _count(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
