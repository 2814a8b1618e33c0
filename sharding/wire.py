"""How gradients travel: what is sent for them, how it is exchanged, and how it is summed.

    wire                 sent for a part of n elements     sum
    PlainWire(dtype)     n elements of `dtype`             ours: FP32, in rank order
    MessageWire(format)  a message: codes and scales       the same (`message_wire.py`)
    NativeWire(dtype)    n elements of `dtype`             the backend's own reduce-scatter

A wire has no state of any exchange, so units share one. One of one's own derives from `Wire`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ..buffers import BufferPool, FlatBuffer, FlatLayout
from ..buffers.layout import round_up
from ..kernels import ALIGN_NUMEL, pack_, reduce_

if TYPE_CHECKING:
    from .collectives import Channel, Pending


class Places:
    """Where tensors lie in elements [start, stop) of a unit's flat buffer, and in the model.

    `first_indices`: of each tensor, how many elements of the model come before it.
    """

    def __init__(
        self, layout: FlatLayout, first_indices: Sequence[int], span: tuple[int, int]
    ) -> None:
        self._cuts: list[tuple[int, int]] = []
        self._indices: dict[int, int] = {}
        for index in layout.order:
            first, stop = layout.overlap(index, span)
            if first < stop:
                offset = layout.segments[index].start + first - span[0]
                self._cuts.append((offset, stop - first))
                self._indices[offset] = first_indices[index] + first
        self._gaps = [
            (max(start, span[0]) - span[0], min(stop, span[1]) - span[0])
            for start, stop in layout.gaps()
            if start < span[1] and stop > span[0]
        ]

    def cut(self, flat: Tensor, *, multiple: int = 1) -> tuple[list[Tensor], list[int]]:
        """What `flat`, which lies there, has of each tensor, as views, and where in it they begin,
        ascending. `multiple`, a divisor of `ALIGN_NUMEL`: with so much of the gap after a tensor
        that it has a multiple of so many elements.
        """
        cuts = [(at, round_up(n, multiple)) for at, n in self._cuts]
        return [flat[at : at + n] for at, n in cuts], [at for at, _ in cuts]

    def indices_at(self, offsets: Sequence[int]) -> list[int]:
        """The elements of the model before those at `offsets`, where tensors begin."""
        return [self._indices.get(offset, 0) for offset in offsets]  # one without elements: any

    def clear_gaps(self, flat: Tensor) -> None:
        """Zero what belongs to no tensor of `flat`, which lies there."""
        for start, stop in self._gaps:
            flat[start:stop].zero_()


class Source(Protocol):
    """The gradients that a message is made of: tensors on a flat buffer of `numel` elements, which
    is zero wherever none of them lies.
    """

    @property
    def numel(self) -> int:
        """Elements of the buffer."""

    @property
    def places(self) -> Places:
        """Where tensors begin in the buffer, whether they have a gradient or not."""

    @property
    def noise_key(self) -> int:
        """64 bits for noise, which no other rank, exchange or axis has."""

    @property
    def residual(self) -> Tensor | None:
        """What the wire has lost so far, [numel] of its `residual_dtype`; None if it wants none, or
        of sums.
        """

    def present(self) -> tuple[list[Tensor], list[int]]:
        """Tensors of FP32, BF16 or FP16, any shapes and strides; where each begins, ascending."""

    def fill(self, flat: Tensor) -> None:
        """Write all of `flat` [numel], FP32, BF16 or FP16: each value is rounded once."""


class Wire:
    """What all wires have. Derive from it, and give what is not implemented here.

    `name`: equal on all ranks, and different for wires that send different bytes. `dtype`: of the
    buffers that travel. `align_numel`: what starts of tensors and parts are multiples of, a
    multiple of 128. `fills_gaps`: what it sums may not be zero where no tensor is.
    `residual_dtype`: of what it keeps for each element of a unit on each rank, if anything.
    `scratch_bytes`: for an element, what `pack` takes beside what it writes, and `reduce`.
    """

    name: str
    dtype: torch.dtype
    align_numel: int = ALIGN_NUMEL
    fills_gaps: bool = False
    residual_dtype: torch.dtype | None = None
    scratch_bytes: int = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def for_vectors(self) -> Wire:
        """How parameters with fewer than two dimensions travel where nothing is said of them."""
        return self

    def part_numel(self, numel: int) -> int:
        """Elements of `dtype` that are sent for a part of `numel` elements, a multiple of
        `align_numel`.
        """
        raise NotImplementedError

    def pack(self, sent: Tensor, source: Source, parts: int) -> None:
        """Write all of `sent` [parts * part_numel(source.numel / parts)]: what each rank along the
        axis gets, in the order of their ranks.
        """
        raise NotImplementedError

    def reduce(
        self,
        out: Tensor,
        rows: Sequence[Tensor],
        *,
        table: Tensor | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        """out [n] = round(sum of `rows` in their order, in FP32, times `scale`), or with
        `accumulate` round(out + that). rows: what every rank packed for us, [part_numel(n)] each;
        table: the same as one tensor [ranks, part_numel(n)], where it lies as one.
        """
        raise NotImplementedError

    def received_parts(self, channel: Channel) -> int:
        """How many parts `exchange` brings."""
        return channel.received_parts

    def exchange(
        self, channel: Channel, received: Tensor, sent: Tensor, what: str
    ) -> list[Pending]:
        """Start to bring what the ranks along the axis have for us into `received`
        [received_parts * part_numel].
        """
        return channel.exchange(received, sent, what)

    def rows(self, channel: Channel, received: Sequence[Tensor], sent: Tensor) -> list[Tensor]:
        """What `reduce` sums: the parts received, our own among them."""
        return channel.rows(received, sent)


class PlainWire(Wire):
    """Elements of one dtype, rounded once; summed in FP32, in rank order."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def part_numel(self, numel: int) -> int:
        """As many."""
        return numel

    def pack(self, sent: Tensor, source: Source, parts: int) -> None:
        """The flat buffer itself, rounded to the wire's dtype."""
        source.fill(sent)

    def reduce(
        self,
        out: Tensor,
        rows: Sequence[Tensor],
        *,
        table: Tensor | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        """See `kernels.reduce_`."""
        reduce_(out, table, scale=scale, accumulate=accumulate, rows=rows)


class NativeWire(PlainWire):
    """The backend's own reduce-scatter of one dtype, as switches that sum (SHARP, NVLS) serve it.

    The backend decides about order and precision: NCCL adds in the wire's dtype, ring or tree,
    so bits depend on the world, the algorithm and the library's version.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.name = f"{self.name}, native sum"

    def received_parts(self, channel: Channel) -> int:
        """The sum alone."""
        return 1

    def exchange(
        self, channel: Channel, received: Tensor, sent: Tensor, what: str
    ) -> list[Pending]:
        """The backend's sum."""
        return channel.reduce_scatter(received, sent, what)

    def rows(self, channel: Channel, received: Sequence[Tensor], sent: Tensor) -> list[Tensor]:
        """The sum alone."""
        return list(received)


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
    numel: int
    """Elements of the unit's flat buffer."""
    noise_key: int = 0
    residual: Tensor | None = None

    @property
    def places(self) -> Places:
        """Those of all tensors."""
        return self.packer.places

    def present(self) -> tuple[list[Tensor], list[int]]:
        """The gradients that there are, and where they begin."""
        found = zip(self.tensors, self.packer.offsets, strict=True)
        pairs = [(tensor, offset) for tensor, offset in found if tensor is not None]
        return [tensor for tensor, _ in pairs], [offset for _, offset in pairs]

    def fill(self, flat: Tensor) -> None:
        """Write them, and zeros elsewhere, to all of `flat` [numel]."""
        if flat.numel() != self.numel:
            raise ValueError(
                f"fill: expected all of a flat buffer of {self.numel} elements, got "
                f"{flat.numel()}; fill one of that size and write what the wire's part_numel says"
            )
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

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        pool: BufferPool,
        first_indices: Sequence[int] | None = None,
    ) -> None:
        """`dtype`: that of the zeros for the gaps, so best that of the buffers. `first_indices`: as
        those of `Places` (None: all 0, where nobody asks).
        """
        self.layout = layout
        first_indices = first_indices or [0] * len(layout.segments)
        self.places = Places(layout, first_indices, (0, layout.numel))
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
        self._numel = layout.numel
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
        return Gradients(self, tensors, self._numel)

    def pack(self, flat: Tensor, grads: Gradients) -> None:
        """Write what `take` returned to all of `flat` [layout.numel]."""
        present = [tensor for tensor in grads.tensors if tensor is not None]
        if len(present) < len(grads.tensors):
            # What no gradient covers counts as zero, padding too: the optimizer sees all of it.
            flat.zero_()
            pack_(flat, *grads.present())
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


class FlatSource:
    """A flat buffer of gradients as a whole: a sum over microbatches or over an axis."""

    def __init__(
        self, flat: Tensor, places: Places, noise_key: int = 0, residual: Tensor | None = None
    ) -> None:
        self.flat, self.numel, self.places = flat, flat.numel(), places
        self.noise_key, self.residual = noise_key, residual

    def present(self) -> tuple[list[Tensor], list[int]]:
        """What lies there of each tensor."""
        return self.places.cut(self.flat)

    def fill(self, flat: Tensor) -> None:
        """Round it to the dtype of `flat`."""
        pack_(flat, [self.flat], [0])
