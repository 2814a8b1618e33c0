"""Integers and memory: where tensors lie in flat buffers, and where that memory comes from."""

from ..kernels import ALIGN_NUMEL as BLOCK_NUMEL  # what users of buffers call it
from .flat_buffer import FlatBuffer
from .layout import FlatLayout, Segment, flat_layout
from .param_and_grad_buffer import (
    Bucket,
    ParamAndGradBuffer,
    ParamAndGradLayout,
    param_and_grad_layout,
)
from .placed_buffer import (
    Grid,
    Hop,
    Movement,
    PlacedBuffer,
    Placement,
    Placements,
    Span,
    cut,
    redistribute,
    spans,
)
from .pool import BufferPool, Streams

__all__ = [
    "BLOCK_NUMEL",
    "Bucket",
    "BufferPool",
    "FlatBuffer",
    "FlatLayout",
    "Grid",
    "Hop",
    "Movement",
    "ParamAndGradBuffer",
    "ParamAndGradLayout",
    "PlacedBuffer",
    "Placement",
    "Placements",
    "Segment",
    "Span",
    "Streams",
    "cut",
    "flat_layout",
    "param_and_grad_layout",
    "redistribute",
    "spans",
]
