"""One 1-D tensor together with its layout: the tensors as views of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .layout import FlatLayout


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """`data` [layout.numel], cut as `layout` says. Views stay valid when storage is resized."""

    data: Tensor
    layout: FlatLayout

    def __post_init__(self) -> None:
        assert self.data.dim() == 1 and self.data.numel() == self.layout.numel, (
            "data does not fit layout"
        )

    def views(self) -> list[Tensor]:
        """One view per tensor, in the caller's order, with the tensors' own shapes."""
        return [
            self.data[segment.start : segment.stop].view(segment.shape)
            for segment in self.layout.segments
        ]
