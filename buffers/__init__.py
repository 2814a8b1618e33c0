"""Integers and memory: where tensors lie in flat buffers, and where that memory comes from."""

from .flat_buffer import FlatBuffer
from .layout import BLOCK_NUMEL, FlatLayout, Segment, flat_layout
from .pool import BufferPool

__all__ = [
    "BLOCK_NUMEL",
    "BufferPool",
    "FlatBuffer",
    "FlatLayout",
    "Segment",
    "flat_layout",
]
