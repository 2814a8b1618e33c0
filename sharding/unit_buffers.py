"""The memory of a unit's parameters on this rank: the main ones, the full ones, the way between.

    main       what users see and optimizers update; always there
    gathered   the full parameters, in the compute dtype; freed between two uses where parameters
               at rest are sharded

Where all parameters stay, in the dtype of `main`, it is a view of `gathered`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import BufferPool, FlatBuffer, PlacedBuffer, Placements
from .collectives import Collectives
from .lanes import Stage
from .message_gather import MessageGather
from .plain_gather import PlainGather
from .unit_spec import UnitSpec


class UnitBuffers:
    """The placed buffers of one unit's parameters."""

    def __init__(self, spec: UnitSpec, collectives: Collectives, pool: BufferPool) -> None:
        """All parameters are zero until `fill`."""
        layout, dtypes, placements = spec.layout, spec.dtypes, spec.placements

        def placed(held: Placements, dtype: torch.dtype) -> PlacedBuffer:
            return PlacedBuffer(pool, layout, collectives.grid, held, dtype)

        self.main = placed(placements.main, dtypes.main)
        self.gathered = placed(placements.whole, dtypes.compute)
        self.frees = placements.frees_params
        is_same = dtypes.compute == dtypes.main and spec.param_wire is None
        self.shares = not self.frees and is_same
        """Whether `main` is a view of `gathered`."""
        self._allocate(pool)
        # Views have to be made while there is memory; they outlive it. Each has a version counter
        # of its own: a write to one parameter must not spoil what autograd saved of the others.
        self.views = [v.data for v in FlatBuffer(self.gathered.memory, layout).views()]
        kind = PlainGather if spec.param_wire is None else MessageGather
        self.way: PlainGather | MessageGather = kind(
            spec, self.main, self.gathered, collectives, pool
        )
        """How parameters are gathered."""
        if self.frees:
            self.gathered.shrink()

    def _allocate(self, pool: BufferPool) -> None:
        flat = pool.lease(self.gathered.numel, self.gathered.dtype)
        # Collectives write through `.data`, which has a version counter of its own, so that
        # tensors which autograd saved from an earlier gather of the same weights stay valid.
        self.gathered.hold(flat.data)
        start, stop = self.main.span
        if self.shares:
            self.main.hold(flat.zero_()[start:stop])
        else:
            self.main.hold(pool.lease(stop - start, self.main.dtype).zero_())

    def fill(self, index: int, whole: Tensor) -> None:
        """Take this rank's part of the initial values `whole` [shape of tensor `index`]."""
        # What `main` is a view of is read without a gather.
        (self.gathered if self.shares else self.main).write(index, whole)

    def stages(self, *, kept_is_fresh: bool, main_is_cast: bool = False) -> list[Stage]:
        """What brings the gathered parameters in; `kept_is_fresh`: from what is kept of them at
        rest, `main_is_cast`: from `way.main_casts`.
        """
        return self.way.stages(kept_is_fresh=kept_is_fresh, main_is_cast=main_is_cast)

    def lose_gather(self) -> None:
        """A gather could not go on."""
        self.way.lose()
        if self.frees and not self.gathered.is_shrunk:
            self.gathered.shrink()
