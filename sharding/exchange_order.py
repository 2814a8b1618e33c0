"""The one order in which all ranks exchange gradients: at first the reverse of registration, then
that of rank 0's first backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .collectives import Collectives


class ExchangeOrder:
    """`indices` of all units, as their exchanges follow each other. `backwards`: how many have done
    all of theirs; noise counts with it.
    """

    def __init__(self, num_units: int, collectives: Collectives) -> None:
        self.backwards = 0
        self.indices = list(reversed(range(num_units)))
        self._collectives = collectives
        self.is_agreed = collectives.world_size == 1 or num_units == 1
        """Whether `indices` will stay."""

    def follow(self, ready: Mapping[int, None]) -> None:
        """A backward of all ranks has ended, in which units became `ready` in this order here: that
        of rank 0 is everybody's from now on, if none was before.
        """
        self.backwards += 1
        if self.is_agreed:
            return
        order = [*ready, *(index for index in self.indices if index not in ready)]
        device = self._collectives.groups.device
        tensor = torch.tensor(order, dtype=torch.int64, device=device)
        self._collectives.broadcast(tensor, "agreement on the order of exchanges")
        self.indices = tensor.tolist()
        self.is_agreed = True
