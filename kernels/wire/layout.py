"""The layout of wire messages: what lies at which byte, and the header that says so.

    header (16 bytes) | data | scales | row scales

Each section starts at a multiple of 16 bytes and the whole is one; bytes between them are 0. A
message holds one vector of `numel` elements. Every tensor in it starts at a multiple of
`align_numel` elements, and the gap up to the next one is what the format makes of zeros.

| format          | data            | scales            | row scales         | align_numel |
|-----------------|-----------------|-------------------|--------------------|-------------|
| fp32 bf16 fp16  | as they are     |                   |                    | 128         |
| fp8_row         | e4m3, a byte    |                   | fp32: 1 / scale    | `row_numel` |
| fp8_1x128       | e4m3, a byte    | fp32: 1 / scale   |                    | 128         |
| mxfp8           | e4m3, a byte    | e8m0 for 32       |                    | 128         |
| mxfp4           | e2m1, two a byte| e8m0 for 32       |                    | 128         |
| nvfp4           | e2m1, two a byte| e4m3 for 16       | fp32: amax         | `row_numel` |

Rows have `row_numel` elements, a power of two. NVFP4's second level is stored as the row's amax, as
`dequantize_nvfp4` takes it: decoding has no division, and one product an element.

The header, little endian: the bytes "SSM1", uint16 the format's place in `MESSAGES`, uint16
`row_numel`, 0 where the format has no rows, uint64 `numel`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..checks import (
    check_choice,
    check_dtype,
    check_integer,
    check_integers,
    check_is_integer,
    check_vector,
)
from ..formats.table import (
    ALIGN_NUMEL,
    BITS_PER_BYTE,
    MESSAGES,
    BlockFormat,
    MessageFormat,
)

MIN_ROW_NUMEL, MAX_ROW_NUMEL = 128, 4096
DEFAULT_ROW_NUMEL = 1024
SECTION_BYTES = 16
HEADER_BYTES = 16
ROWS_DIMS = 2  # of a tensor with a message in each row
MAGIC = b"SSM1"
_HEADER = struct.Struct("<4sHHQ")

assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Where everything of one message lies: `offsets` in elements, `*_at` and `num_bytes` in bytes.

    offsets: the first element of each tensor, where the layout was made for tensors; of several
    messages in the vector of all.
    """

    format: MessageFormat
    row_numel: int
    numel: int
    offsets: tuple[int, ...]
    data_at: int
    scales_at: int
    row_scales_at: int
    num_bytes: int

    @property
    def data_bytes(self) -> int:
        """Bytes of the elements, which are a multiple of 64, so that no padding follows them."""
        return self.scales_at - self.data_at

    @property
    def num_scales(self) -> int:
        """Scales of blocks."""
        return _num_scales(self.format, self.numel)

    @property
    def num_rows(self) -> int:
        """Scales of rows."""
        return self.numel // self.row_numel if self.format.has_rows else 0

    @property
    def align_numel(self) -> int:
        """The elements that every tensor's place is a multiple of."""
        return _align_numel(self.format, self.row_numel)

    @property
    def scales_end(self) -> int:
        """Where the scales of blocks end, and bytes of 0 begin."""
        return self.scales_at + _scale_bytes(self.format, self.numel)

    @property
    def row_scales_end(self) -> int:
        """Where the scales of rows end, and bytes of 0 begin."""
        return self.row_scales_at + self.num_rows * torch.float32.itemsize


def message_format(name: str) -> MessageFormat:
    """The format called `name`; `ValueError` when messages have none of that name."""
    check_choice("format", name, MESSAGES)
    return MESSAGES[name]


def message_layout(
    format: str,
    numels: Sequence[int],
    *,
    row_numel: int = DEFAULT_ROW_NUMEL,
    parts: int = 1,
) -> MessageLayout:
    """The layout of a message of tensors of `numels` elements, one after the other.

    row_numel: elements of a row, a power of two from 128 to 4096; only fp8_row and nvfp4 look at
    it. parts: that of each of so many messages, all as short as the tensors allow. Raises
    `ValueError` for an unknown format, another `row_numel`, a negative numel, or no part.
    """
    align = checked_align(format, row_numel)
    parts = check_integer("parts", parts, 1)
    offsets, end = [], 0
    for index, numel in enumerate(check_integers("numels", numels)):
        check_integer(f"numels[{index}]", numel, 0)
        offsets.append(end)
        end += -(-numel // align) * align
    share = -(-end // (align * parts)) * align
    return _layout(message_format(format), row_numel, share, tuple(offsets))


def layout_of_numel(
    format: str,
    numel: int,
    *,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> MessageLayout:
    """The layout of a message of `numel` elements, a multiple of the format's `align_numel`.

    Raises `ValueError` as `message_layout` does, and for another `numel`.
    """
    align = checked_align(format, row_numel)
    if numel < 0 or numel % align:
        raise ValueError(
            f"numel: expected a multiple of {align}, 0 or more, got {numel}; count the gaps too"
        )
    return _layout(message_format(format), row_numel, numel, ())


def layout_of_bytes(
    format: str,
    num_bytes: int,
    *,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> MessageLayout:
    """The one layout of this format whose messages have `num_bytes`.

    Raises `ValueError` as `message_layout` does, and where there is none.
    """
    align = checked_align(format, row_numel)
    form = message_format(format)
    low, high = 0, max(0, num_bytes) * BITS_PER_BYTE // (form.element.stored_bits * align) + 1
    while low < high:  # messages grow with every `align` elements
        middle = (low + high) // 2
        if _layout(form, row_numel, middle * align, ()).num_bytes < num_bytes:
            low = middle + 1
        else:
            high = middle
    found = _layout(form, row_numel, low * align, ())
    if found.num_bytes != num_bytes:
        raise ValueError(
            f"message: expected a length that a {format} message can have, {found.num_bytes} for "
            f"{found.numel} elements, say, got {num_bytes} bytes; allocate layout.num_bytes"
        )
    return found


def header_bytes(layout: MessageLayout) -> bytes:
    """The 16 bytes at the start of a message of this layout."""
    form = layout.format
    row_numel = layout.row_numel if form.has_rows else 0
    return _HEADER.pack(MAGIC, list(MESSAGES).index(form.name), row_numel, layout.numel)


def write_header(message: torch.Tensor, layout: MessageLayout) -> None:
    """Write the header of a message: uint8 [layout.num_bytes]. `ValueError` for another message."""
    check_message("message", message)
    check_length("message", message, layout)
    header = torch.frombuffer(bytearray(header_bytes(layout)), dtype=torch.uint8)
    message[:HEADER_BYTES].copy_(header)


def read_header(message: torch.Tensor, *, row_numel: int = DEFAULT_ROW_NUMEL) -> tuple[str, int]:
    """(format, numel) of a message, uint8 [num_bytes]; the host waits for a GPU's.

    Raises `ValueError` for a message that is too short for a header, has another magic or an
    unknown format, rows of another `row_numel`, or a length that is not what these and numel make.
    """
    check_message("message", message)
    if message.numel() < HEADER_BYTES:
        raise ValueError(
            f"message: expected {HEADER_BYTES} bytes or more, got {message.numel()}; it is too "
            "short for its header"
        )
    if message.is_meta:
        raise ValueError("message: expected bytes to read, got a meta tensor; pass a real one")
    header = bytes(message[:HEADER_BYTES].tolist())
    magic, identifier, sent_row_numel, numel = _HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(
            f"message: expected a header that starts with {MAGIC!r}, got {magic!r}; pass what "
            "pack_message_ has written"
        )
    if identifier >= len(MESSAGES):
        raise ValueError(
            f"message: expected a format from 0 to {len(MESSAGES) - 1} in its header, got "
            f"{identifier}; use the sender's version"
        )
    name, form = list(MESSAGES.items())[identifier]
    align = checked_align(name, row_numel)
    if form.has_rows and sent_row_numel != row_numel:
        raise ValueError(
            f"message: expected rows of {row_numel} elements, got {sent_row_numel} in its header; "
            "pass the sender's row_numel"
        )
    if numel % align:
        raise ValueError(
            f"message: expected a multiple of {align} elements in its header, {name}, got {numel}; "
            "pass what pack_message_ has written"
        )
    check_length("message", message, layout_of_numel(name, numel, row_numel=row_numel))
    return name, numel


def check_message(name: str, message: torch.Tensor) -> None:
    """Raise `ValueError` unless `message` is a contiguous 1-D uint8 tensor."""
    check_dtype(name, message, (torch.uint8,))
    check_vector(name, message)


def check_messages(name: str, messages: torch.Tensor) -> None:
    """Raise `ValueError` unless it is a contiguous uint8 tensor, 1-D or a message a row."""
    check_dtype(name, messages, (torch.uint8,))
    if messages.dim() == ROWS_DIMS and messages.shape[0] and messages.is_contiguous():
        return
    if messages.dim() != 1 or not messages.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous 1-D tensor, or a 2-D one with a row for each message, "
            f"got shape {tuple(messages.shape)} with strides {messages.stride()}; pass contiguous "
            "memory"
        )


def check_length(name: str, message: torch.Tensor, layout: MessageLayout) -> None:
    """Raise `ValueError` unless `message`, or each of its rows, has the bytes of its layout."""
    if message.shape[-1] != layout.num_bytes:
        each = " a row" * (message.dim() - 1)
        raise ValueError(
            f"{name}: expected {layout.num_bytes} bytes{each}, {layout.format.name} of "
            f"{layout.numel} elements, got {message.shape[-1]}; allocate layout.num_bytes"
        )


def checked_align(name: str, row_numel: int) -> int:
    """`align_numel` of the format; raises for a format or `row_numel` that there is not."""
    form = message_format(name)
    check_is_integer("row_numel", row_numel)
    is_power = row_numel > 0 and row_numel & (row_numel - 1) == 0
    if not is_power or not MIN_ROW_NUMEL <= row_numel <= MAX_ROW_NUMEL:
        raise ValueError(
            f"row_numel: expected a power of two from {MIN_ROW_NUMEL} to {MAX_ROW_NUMEL}, got "
            f"{row_numel}; choose one of them"
        )
    return _align_numel(form, row_numel)


def _layout(
    form: MessageFormat, row_numel: int, numel: int, offsets: tuple[int, ...]
) -> MessageLayout:
    row_scales = numel // row_numel * torch.float32.itemsize if form.has_rows else 0
    scales_at = HEADER_BYTES + _padded(numel * form.element.stored_bits // BITS_PER_BYTE)
    row_scales_at = scales_at + _padded(_scale_bytes(form, numel))
    return MessageLayout(
        format=form,
        row_numel=row_numel,
        numel=numel,
        offsets=offsets,
        data_at=HEADER_BYTES,
        scales_at=scales_at,
        row_scales_at=row_scales_at,
        num_bytes=row_scales_at + _padded(row_scales),
    )


def _align_numel(form: MessageFormat, row_numel: int) -> int:
    return row_numel if form.has_rows else ALIGN_NUMEL


def _num_scales(form: MessageFormat, numel: int) -> int:
    block_numel = form.block_numel if isinstance(form, BlockFormat) else None
    return numel // block_numel if block_numel else 0


def _scale_bytes(form: MessageFormat, numel: int) -> int:
    return _num_scales(form, numel) * form.scale_dtype.itemsize if form.scale_dtype else 0


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // SECTION_BYTES) * SECTION_BYTES
