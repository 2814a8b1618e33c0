"""Number formats: limits against torch, byte counts by hand, look-ups and their errors."""

import dataclasses

import pytest
import torch

from sidestream.kernels import WIRE_FORMATS, WireFormat, wire_format_named, wire_format_of

FORMATS = pytest.mark.parametrize("wire_format", WIRE_FORMATS, ids=lambda found: found.name)


@FORMATS
def test_limits_are_those_of_torch(wire_format):
    info = torch.finfo(wire_format.dtype)
    assert (wire_format.max_finite, wire_format.element_bits) == (info.max, info.bits)


@FORMATS
def test_look_up_finds_the_one_object(wire_format):
    assert wire_format_of(wire_format.dtype) is wire_format
    assert wire_format_named(wire_format.name) is wire_format


@FORMATS
@pytest.mark.parametrize("numel", [0, 1, 129, 2**33 + 1])
def test_bytes_without_scales_are_the_elements(wire_format, numel):
    assert wire_format.num_bytes(numel) == numel * wire_format.dtype.itemsize


def test_bytes_of_blocks_include_their_scales():
    """Four bits an element, 32 elements a block, one scale byte: 33 elements are 17 + 2 bytes."""
    blocks = WireFormat("blocks", torch.uint8, 4, 6.0, block_numel=32, scale_dtype=torch.uint8)
    assert [blocks.num_bytes(numel) for numel in (0, 1, 32, 33)] == [0, 2, 17, 19]


def test_negative_numel_is_refused():
    with pytest.raises(ValueError, match=r"numel: expected 0 or more, got -1"):
        wire_format_named("fp32").num_bytes(-1)


def test_unknown_dtype_and_name_say_what_is_known():
    with pytest.raises(ValueError, match=r"expected one of torch\.float32.*got torch\.int64"):
        wire_format_of(torch.int64)
    with pytest.raises(ValueError, match=r"expected one of fp32, bf16, fp16, got 'fp12'"):
        wire_format_named("fp12")


def test_formats_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        wire_format_named("fp32").name = "other"
