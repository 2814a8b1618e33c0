"""Outputs that lie in the memory of parameters, which then outlive the forward of their module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .modules.structures import tensors_in
from .unit import Unit

_PLAIN = (torch.Tensor, nn.Parameter)


class LentOutputs:
    """`lenders`: indices of units that an output of this forward lies in, such as a slice of a
    position table.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.lenders: set[int] = set()
        self._owners = {
            unit.freed_storage: unit.spec.index for unit in units if unit.frees_parameters
        }

    def note(self, output: object) -> None:
        """Find out whether a module's `output` lies in parameters."""
        if self._owners:
            for tensor in tensors_in(output):
                # Other layouts and subclasses may have no storage; no parameter is one of them.
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    owner = self._owners.get(tensor.untyped_storage()._cdata)
                    if owner is not None:
                        self.lenders.add(owner)
