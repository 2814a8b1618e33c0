"""Packs the gradients of a unit's parameters into a flat buffer of the unit's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, FlatBuffer, FlatLayout
from ..kernels import pack_

LARGE_GAP_NUMEL = 1024
"""A gap of at least as many elements, such as the end of a small unit over many ranks, is filled
where it lies: reading zeros to copy would be another pass over it.
"""


@dataclass(slots=True)
class Gradients:
    """What the parameters of a unit had, in ascending order of offset, as the `Source` of a
    message.
    """

    packer: GradientPacker
    tensors: list[Tensor | None]

    @property
    def numel(self) -> int:
        """Elements of the unit's flat buffer."""
        return self.packer.layout.numel

    def present(self) -> tuple[list[Tensor], list[int]]:
        """The gradients that there are, and where they begin."""
        found = zip(self.tensors, self.packer.offsets, strict=True)
        pairs = [(tensor, offset) for tensor, offset in found if tensor is not None]
        return [tensor for tensor, _ in pairs], [offset for _, offset in pairs]

    def fill(self, flat: Tensor) -> None:
        """Write them, and zeros elsewhere, to all of `flat` [numel]."""
        self.packer.pack(flat, self)

    def add_to(self, flat: Tensor) -> None:
        """Add them to `flat` [numel]."""
        tensors, offsets = self.present()
        pack_(flat, tensors, offsets, accumulate=True)

    def clear(self) -> None:
        """Let go of them."""
        self.tensors.clear()


class GradientPacker:
    """Takes gradients from parameters and packs them, `None`s and padding as zeros.

    Tensors go in ascending order of offset, zeros for small gaps between them included: `pack_`
    checks its arguments fastest so, and every element of the buffer is written.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, pool: BufferPool) -> None:
        """`dtype`: that of the zeros for the gaps, so best that of the buffers."""
        self.layout = layout
        self._pool = pool
        self.offsets = [layout.segments[index].start for index in layout.order]
        gaps = [gap for gap in layout.gaps() if gap[1] - gap[0] < LARGE_GAP_NUMEL]
        self._large_gaps = [gap for gap in layout.gaps() if gap[1] - gap[0] >= LARGE_GAP_NUMEL]
        zeros = torch.zeros(max((stop - start for start, stop in gaps), default=0), dtype=dtype)
        zeros = zeros.to(pool.device)
        self._covering_offsets = sorted([*self.offsets, *(start for start, _ in gaps)])
        self._gap_inserts = [
            (self._covering_offsets.index(start), zeros[: stop - start]) for start, stop in gaps
        ]
        self._slots_key = ("slots", id(layout))

    def take(self, params: Sequence[nn.Parameter]) -> Gradients:
        """Every parameter's gradient, in ascending order of offset, sparse ones (autograd makes no
        others that are not strided) as dense ones; the parameters lose theirs.
        """
        tensors = [
            grad if (grad := params[index].grad) is None or not grad.is_sparse else grad.to_dense()
            for index in self.layout.order
        ]
        for param in params:
            param.grad = None
        return Gradients(self, tensors)

    def pack(self, flat: Tensor, grads: Gradients) -> None:
        """Write what `take` returned to all of `flat` [layout.numel]."""
        present, offsets = grads.present()
        if len(present) < len(grads.tensors):
            # What no gradient covers counts as zero, padding too: the optimizer sees all of it.
            flat.zero_()
            pack_(flat, present, offsets)
            return
        for start, stop in self._large_gaps:
            flat[start:stop].zero_()
        for position, zeros in self._gap_inserts:
            present.insert(position, zeros)
        slots = self._pool.views(flat, self._slots_key, self._make_slots)
        pack_(flat, present, self._covering_offsets, slots=slots)

    def _make_slots(self, flat: Tensor) -> list[Tensor]:
        views = FlatBuffer(flat, self.layout).views()
        slots = [views[index] for index in self.layout.order]
        for position, zeros in self._gap_inserts:
            start = self._covering_offsets[position]
            slots.insert(position, flat[start : start + zeros.numel()])
        return slots
