"""Tensors in, tensors out: pack, unpack and reduce on CPU and GPU, and the number formats."""

from .formats import BF16, FP16, FP32, WIRE_FORMATS, WireFormat, wire_format_named, wire_format_of
from .launch import LaunchConfig
from .ops import pack_, reduce_, unpack_

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "WIRE_FORMATS",
    "LaunchConfig",
    "WireFormat",
    "pack_",
    "reduce_",
    "unpack_",
    "wire_format_named",
    "wire_format_of",
]
