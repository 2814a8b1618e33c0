"""Integers and memory: where tensors lie in flat buffers, and where that memory comes from."""

from .flat_buffer import FlatBuffer
from .layout import FlatLayout, Segment, flat_layout
from .pool import BufferPool

__all__ = [
    "BufferPool",
    "FlatBuffer",
    "FlatLayout",
    "Segment",
    "flat_layout",
]
