"""Tensors for wire messages, the memory they are packed into, and what is compared."""

import dataclasses

import torch

from sidestream.kernels.formats.table import MESSAGES, WIRE_FORMATS
from sidestream.kernels.wire.layout import MessageLayout, layout_of_numel, message_layout
from sidestream.kernels.wire.reference import MessageCast
from sidestream.tests.kernels import oracle

FORMATS = tuple(MESSAGES)
RAW_DTYPES = {form.name: form.dtype for form in WIRE_FORMATS}
ALWAYS_NEAREST = ("fp32", "fp16")
STOCHASTIC = tuple(name for name in FORMATS if name not in ALWAYS_NEAREST)
POISON = 0xAB
MARGIN = 32  # bytes around a message, which must stay as they were; keeps it 16-byte aligned
SEED = -(2**63) + 12345
BLOCK_NUMELS = {"fp8_1x128": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
NAN_DATA = {"fp8_row": 0x7F, "fp8_1x128": 0x7F, "mxfp8": 0x7F, "mxfp4": 0x77, "nvfp4": 0x77}
_NAN_FP32 = (0x00, 0x00, 0xC0, 0x7F)
NAN_SCALES = {
    name: torch.tensor(scale, dtype=torch.uint8)
    for name, scale in {
        "fp8_row": _NAN_FP32,
        "fp8_1x128": _NAN_FP32,
        "mxfp8": (0xFF,),
        "mxfp4": (0xFF,),
        "nvfp4": (0x7F,),
    }.items()
}
"""The bytes of the data, and of the scale, of a block with an element that is not finite."""


def tensors(shapes, *, seed=1, transposed=(), unaligned=()):
    """Values in FP32, BF16 and FP16 by turns; some not contiguous, some an element late."""
    made = []
    for index, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        late = int(index in unaligned)
        memory = oracle.values(numel + late, oracle.DTYPES[index % 3], seed + index)
        tensor = memory[late:]
        made.append(tensor.view(shape[::-1]).t() if index in transposed else tensor.view(shape))
    return made


def block_numel(name, row_numel):
    """Elements that one that is not finite spoils."""
    return row_numel if name == "fp8_row" else BLOCK_NUMELS.get(name, 1)


def layout_for(name, given, row_numel):
    return message_layout(name, [tensor.numel() for tensor in given], row_numel=row_numel)


def packed(
    function,
    layout: MessageLayout,
    given,
    *,
    first_indices=None,
    margin=MARGIN,
    parts=None,
    **options,
):
    """The poisoned memory around a message of this layout after `function` has packed `given`.

    parts: around so many, in rows.
    """
    cast = MessageCast(row_numel=layout.row_numel, **options)
    size = (parts or 1) * layout.num_bytes
    memory = torch.full((size + 2 * margin,), POISON, dtype=torch.uint8)
    message = memory[margin : len(memory) - margin]
    indices = layout.offsets if first_indices is None else first_indices
    function(
        message if parts is None else message.view(parts, -1),
        given,
        layout.format.name,
        layout.numel,
        layout.offsets,
        indices,
        *dataclasses.astuple(cast),
    )
    return memory


def message_in(memory, margin=MARGIN):
    assert memory[:margin].eq(POISON).all(), "written before the message"
    assert memory[len(memory) - margin :].eq(POISON).all(), "written after the message"
    return memory[margin : len(memory) - margin]


def unpacked(function, layout, message, like, scale=1.0, accumulate=False):
    """Tensors strided as `like` and filled with its values, after `function` has unpacked."""
    made = []
    for tensor in like:
        memory = torch.full((tensor.numel() + 16,), oracle.CANARY, dtype=tensor.dtype)
        view = memory[8 : 8 + tensor.numel()].as_strided(tensor.shape, tensor.stride())
        made.append((memory, view.copy_(tensor)))
    arguments = (layout.format.name, layout.numel, layout.offsets)
    views = [view for _, view in made]
    function(views, message, *arguments, scale, accumulate, layout.row_numel)
    for memory, view in made:
        around = torch.cat((memory[:8], memory[8 + view.numel() :]))
        assert around.eq(oracle.CANARY).all(), "written around a tensor"
    return views


def sections(message, layout):
    """(data, scales, row scales, what is between them) of a message."""
    scales_end, rows_end = layout.scales_end, layout.row_scales_end
    data = message[layout.data_at : layout.scales_at]
    padding = torch.cat((message[scales_end : layout.row_scales_at], message[rows_end:]))
    scales, rows = message[layout.scales_at : scales_end], message[layout.row_scales_at : rows_end]
    return data, scales, rows.clone().view(torch.float32), padding


def assert_same_messages(found, expected, layout):
    """To the last byte, but that any NaN equals any NaN in a message of 16 or 32 bits."""
    dtype = RAW_DTYPES.get(layout.format.name)
    if dtype is None:
        wrong = (found != expected).nonzero().view(-1).tolist()
        assert not wrong, f"{len(wrong)} bytes differ, first at {wrong[:8]} of {layout}"
        return
    assert torch.equal(found[: layout.data_at], expected[: layout.data_at])
    one, other = (m[layout.data_at :].clone().view(dtype) for m in (found, expected))
    oracle.assert_same_bits(one, other)


def padded(given, layout, scale=1.0):
    """The FP32 vector of a message, written element by element of its definition."""
    vector = torch.zeros(layout.numel)
    for tensor, offset in zip(given, layout.offsets, strict=True):
        scaled = tensor.float() * torch.tensor(scale)
        vector[offset : offset + tensor.numel()] = scaled.reshape(-1)
    return vector


def with_offsets(layout, offsets, numel):
    """The same format and rows with other places."""
    made = layout_of_numel(layout.format.name, numel, row_numel=layout.row_numel)
    return dataclasses.replace(made, offsets=tuple(offsets))
