"""The layout of wire messages: golden layouts and headers, every byte accounted for, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestream.kernels.formats import table as formats
from sidestream.kernels.wire.layout import (
    checked_align,
    header_bytes,
    layout_of_bytes,
    layout_of_numel,
    message_layout,
    read_header,
    write_header,
)
from sidestream.tests.kernels.wire import cases

FORMAT = pytest.mark.parametrize("name", cases.FORMATS)
ROW_NUMELS = (128, 256, 512, 1024, 2048, 4096)


@pytest.mark.parametrize(
    ("name", "row_numel", "expected"),
    [
        # Tensors of 300, 0 and 129 elements: 384 and 256 in steps of 128, a row each of 1024.
        ("fp32", 1024, (640, (0, 384, 384), 16, 2576, 2576, 2576)),
        ("bf16", 1024, (640, (0, 384, 384), 16, 1296, 1296, 1296)),
        ("fp16", 128, (640, (0, 384, 384), 16, 1296, 1296, 1296)),
        # 2 rows of 4 bytes in 16.
        ("fp8_row", 1024, (2048, (0, 1024, 1024), 16, 2064, 2064, 2080)),
        ("fp8_row", 128, (640, (0, 384, 384), 16, 656, 656, 688)),
        # 5 scales of 4 bytes in 32; 20 of one byte in 32.
        ("fp8_1x128", 1024, (640, (0, 384, 384), 16, 656, 688, 688)),
        ("mxfp8", 1024, (640, (0, 384, 384), 16, 656, 688, 688)),
        ("mxfp4", 1024, (640, (0, 384, 384), 16, 336, 368, 368)),
        # 2048 / 2 bytes, 128 scales, 2 amaxes; 640 / 2, 40 in 48, 5 of 4 in 32.
        ("nvfp4", 1024, (2048, (0, 1024, 1024), 16, 1040, 1168, 1184)),
        ("nvfp4", 128, (640, (0, 384, 384), 16, 336, 384, 416)),
    ],
)
def test_golden_layouts(name, row_numel, expected):
    layout = message_layout(name, [300, 0, 129], row_numel=row_numel)
    numel, offsets, data_at, scales_at, row_scales_at, num_bytes = expected
    assert (layout.format.name, layout.row_numel) == (name, row_numel)
    assert (layout.numel, layout.offsets) == (numel, offsets)
    assert (layout.data_at, layout.scales_at) == (data_at, scales_at)
    assert (layout.row_scales_at, layout.num_bytes) == (row_scales_at, num_bytes)


@FORMAT
@settings(max_examples=30, deadline=None)
@given(
    numels=st.lists(st.integers(0, 9000), max_size=6),
    row_numel=st.sampled_from(ROW_NUMELS),
)
def test_everything_has_its_place(name, numels, row_numel):
    layout = message_layout(name, numels, row_numel=row_numel)
    align = layout.align_numel
    end = 0
    for numel, offset in zip(numels, layout.offsets, strict=True):
        assert offset == end, "tensors follow each other"
        assert offset % align == 0
        end = -(-(offset + numel) // align) * align
    assert layout.numel == end
    block_format = {form.name: form for form in formats.BLOCK_FORMATS}.get(name)
    scale_bytes = layout.scales_end - layout.scales_at
    if block_format is None:
        assert layout.data_bytes == formats.wire_format_named(name).num_bytes(end)
    else:
        assert layout.data_bytes == block_format.data_bytes(end)
        has_blocks = block_format.block_numel is not None
        assert scale_bytes == (block_format.scale_bytes(end) if has_blocks else 0)
    starts = (layout.data_at, layout.scales_at, layout.row_scales_at, layout.num_bytes)
    sizes = (layout.data_bytes, scale_bytes, layout.row_scales_end - layout.row_scales_at)
    assert starts[0] == 16
    for start, stop, size in zip(starts, starts[1:], sizes, strict=False):
        assert start % 16 == 0
        assert stop == start + -(-size // 16) * 16


@FORMAT
@pytest.mark.parametrize("row_numel", ROW_NUMELS)
def test_the_length_tells_the_layout(name, row_numel):
    align = checked_align(name, row_numel)
    lengths = set()
    for count in (*range(70), 1000, 2**31, 2**40 + 1):
        layout = layout_of_numel(name, count * align, row_numel=row_numel)
        assert layout_of_bytes(name, layout.num_bytes, row_numel=row_numel) == layout
        lengths.add(layout.num_bytes)
    assert len(lengths) == 73
    with pytest.raises(ValueError, match=r"message: expected a length that a .* got 17 bytes"):
        layout_of_bytes(name, 17, row_numel=row_numel)
    for short in (0, -1, 15):
        with pytest.raises(ValueError, match="message: expected a length"):
            layout_of_bytes(name, short, row_numel=row_numel)


def test_golden_header():
    """Little endian: mxfp4 is number 6, 640 is 0x0280."""
    layout = message_layout("mxfp4", [300, 0, 129])
    expected = b"SSM1" + bytes([6, 0, 0, 0]) + bytes([0x80, 2, 0, 0, 0, 0, 0, 0])
    assert header_bytes(layout) == expected
    assert list(formats.MESSAGES) == [
        *("fp32", "bf16", "fp16", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
    ]
    assert header_bytes(layout_of_numel("fp32", 2**40))[8:] == bytes([0, 0, 0, 0, 0, 1, 0, 0])
    rows = [header_bytes(layout_of_numel(name, 0, row_numel=512)) for name in ("fp8_row", "nvfp4")]
    assert [header[4:8] for header in rows] == [bytes([3, 0, 0, 2]), bytes([7, 0, 0, 2])]


def message_of(name, numel, row_numel=1024):
    layout = layout_of_numel(name, numel, row_numel=row_numel)
    message = torch.full((layout.num_bytes,), cases.POISON, dtype=torch.uint8)
    write_header(message, layout)
    return message


@FORMAT
@pytest.mark.parametrize("row_numel", [128, 4096])
def test_headers_are_read_back(name, row_numel):
    for numel in (0, 4096, 12288):
        message = message_of(name, numel, row_numel)
        assert message[16:].eq(cases.POISON).all()
        assert read_header(message, row_numel=row_numel) == (name, numel)


def edited(place, value):
    message = message_of("nvfp4", 1024)
    message[place] = value
    return message


BAD_MESSAGES = {
    "short": (torch.zeros(15, dtype=torch.uint8), r"message: expected 16.*got 15; it is too short"),
    "empty": (torch.zeros(0, dtype=torch.uint8), r"got 0; it is too short for its header"),
    "dtype": (torch.zeros(16), r"message: expected torch\.uint8, got torch\.float32"),
    "2-d": (torch.zeros(4, 4, dtype=torch.uint8), r"message: expected a contiguous 1-D tensor"),
    "stride": (torch.zeros(64, dtype=torch.uint8)[::2], r"message: expected a contiguous 1-D"),
    "magic": (edited(3, 0x32), r"expected a header that starts with b'SSM1', got b'SSM2'"),
    "format": (edited(4, 8), r"message: expected a format from 0 to 7 in its header, got 8"),
    "other format": (edited(4, 5), r"message: expected 1072 bytes, mxfp8 of 1024 elements, got"),
    "numel": (edited(9, 8), r"message: expected 1184 bytes, nvfp4 of 2048 elements, got 608"),
    "odd numel": (
        edited(8, 1),
        r"message: expected a multiple of 1024 elements in its header.*got 1025",
    ),
    "cut": (message_of("nvfp4", 1024)[:-1], r"expected 608 bytes, nvfp4 of 1024 .*, got 607"),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_bad_messages(case):
    message, error = BAD_MESSAGES[case]
    with pytest.raises(ValueError, match=error):
        read_header(message)


@pytest.mark.parametrize("name", ["fp8_row", "nvfp4"])
def test_header_of_other_rows(name):
    """Whose message may be as long: sections are padded."""
    message = message_of(name, 1024, 512)
    error = r"message: expected rows of 1024 elements, got 512 in its header; pass the sender's"
    with pytest.raises(ValueError, match=error):
        read_header(message)
    assert read_header(message_of("mxfp8", 1024, 512)) == ("mxfp8", 1024)


@pytest.mark.parametrize("row_numel", [0, -128, 64, 100, 127, 129, 1000, 8192])
def test_bad_rows(row_numel):
    error = f"row_numel: expected a power of two from 128 to 4096, got {row_numel}; "
    for make in (lambda: message_layout("fp8_row", [1], row_numel=row_numel),
                 lambda: layout_of_numel("bf16", 128, row_numel=row_numel),
                 lambda: layout_of_bytes("bf16", 16, row_numel=row_numel)):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            make()


def test_other_bad_layouts():
    with pytest.raises(ValueError, match=r"format: expected one of fp32, bf16.*got 'fp4'; choose"):
        message_layout("fp4", [1])
    with pytest.raises(ValueError, match=r"numels\[1\]: expected 0 or more, got -1"):
        message_layout("fp32", [1, -1])
    for numel in (-128, 64, 129):
        with pytest.raises(ValueError, match=f"numel: expected a multiple of 128.*got {numel}"):
            layout_of_numel("mxfp8", numel)
    layout = layout_of_numel("mxfp8", 128)
    with pytest.raises(ValueError, match=r"message: expected 160 bytes, mxfp8 of 128.*got 161"):
        write_header(torch.zeros(161, dtype=torch.uint8), layout)
