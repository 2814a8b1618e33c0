"""Owns the ops that sum wire messages over ranks: schemas, devices, argument checks.

| op                    | reads                            | writes |
|-----------------------|----------------------------------|--------|
| reduce_messages_      | messages, one [world, bytes]     | out    |
| reduce_peer_messages_ | messages, world times [bytes]    | out    |

On CPUs `reference_sum` does it, which defines both; on GPUs `sum`, in
one launch. `layout` says what a message is. With `accumulate` what is written is read
first. The ops write in place, return nothing and are not differentiable; no host waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import op as ops
from ..aliasing import are_sources, check_apart
from ..checks import (
    SOURCE_DTYPES,
    check_contiguous,
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_tensors,
    check_vector,
)
from . import reference_sum as reference
from .layout import DEFAULT_ROW_NUMEL, HEADER_BYTES, MessageLayout, checked_align, layout_of_numel

_OPTIONS = (
    f"str format, float scale=1.0, bool accumulate=False, SymInt row_numel={DEFAULT_ROW_NUMEL}"
)
_MODULE = "wire.sum"
_ROWS = ops.Op(
    f"reduce_messages_(Tensor(a!) out, Tensor messages, {_OPTIONS}) -> ()",
    reference.reduce_messages_,
    ops.on_first_use(_MODULE, "reduce_messages_"),
)
_PEERS = ops.Op(
    f"reduce_peer_messages_(Tensor(a!) out, Tensor[] messages, {_OPTIONS}) -> ()",
    reference.reduce_peer_messages_,
    ops.on_first_use(_MODULE, "reduce_peer_messages_"),
)
_ROWS_DIMS = 2


def reduce_messages_(
    out: torch.Tensor,
    messages: torch.Tensor,
    format: str,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Decode one message per rank and sum them into `out`: in FP32, in rank order, rounded once.

    out: 1-D, contiguous, FP32, BF16 or FP16, of as many elements as a message has, gaps counted.
    messages: uint8 [world, bytes of a message], contiguous, world >= 1, on the device of `out` and
    not overlapping it. format: a name of `layout.MESSAGE_FORMATS`; row_numel: that of the
    sender. Nobody looks at the headers, on a GPU or a CPU: `read_header` does, and the host waits.

    acc = (decode(messages[0]) + decode(messages[1])) + ...; out = round(acc * scale), or with
    `accumulate` out = round(float32(out) + acc * scale). decode is one product of code and scale in
    FP32, none is fused with a sum, so a CPU and a GPU give the same bits. A NaN of a scale makes
    NaNs of its own block alone. Bytes moved an element of `out`: world * those of an element with
    its share of the scales - 4, 2, 1, 1.03, 0.53 or 0.57 - and its own, twice with `accumulate`.

    Source: our own format. Raises `ValueError` before anything is written.
    """
    layout = _checked_layout(out, format, row_numel)
    check_dtype("messages", messages, (torch.uint8,))
    check_device("messages", messages, out.device)
    if messages.dim() != _ROWS_DIMS or messages.shape[0] == 0:
        raise ValueError(
            f"messages: expected shape (world, {layout.num_bytes}) with world >= 1, got "
            f"{tuple(messages.shape)}; pass one row per rank"
        )
    _check_num_bytes("messages", messages.shape[1], layout)
    check_contiguous("messages", messages)
    check_apart({"out": out}, {"messages": messages})
    scale, accumulate = check_number("scale", scale), check_flag("accumulate", accumulate)
    ops.call(_ROWS, out, out, messages, format, scale, accumulate, row_numel)


def reduce_peer_messages_(
    out: torch.Tensor,
    messages: Sequence[torch.Tensor],
    format: str,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """`reduce_messages_` of messages that lie anywhere, such as in the symmetric memory of peers.

    messages: for each rank, in their order, a contiguous 1-D uint8 tensor that the device of `out`
    can read, not overlapping `out`. A GPU finds their addresses in a table, which is made anew only
    for other addresses; all is fastest where all of them are multiples of 16. Whoever shares the
    memory sees to it that every message is complete before, and untouched until the sum is.
    """
    layout = _checked_layout(out, format, row_numel)
    messages = check_tensors("messages", messages)
    if not messages:
        raise ValueError("messages: expected one or more, got none; pass one message per rank")
    if not ops.is_usual(_are_messages, out, messages, layout.num_bytes):
        named = {f"messages[{rank}]": message for rank, message in enumerate(messages)}
        for name, message in named.items():
            check_dtype(name, message, (torch.uint8,))
            check_device(name, message, out.device)
            check_vector(name, message)
            _check_num_bytes(name, message.shape[0], layout)
        check_apart({"out": out}, named)
    scale, accumulate = check_number("scale", scale), check_flag("accumulate", accumulate)
    ops.call(_PEERS, out, out, messages, format, scale, accumulate, row_numel)


def _are_messages(out: torch.Tensor, messages: Sequence[torch.Tensor], num_bytes: int) -> bool:
    return are_sources(out, messages, (torch.uint8,)) and all(
        message.shape == (num_bytes,) and message.is_contiguous() for message in messages
    )


def _checked_layout(out: torch.Tensor, format: str, row_numel: int) -> MessageLayout:
    """The layout of messages for `out`."""
    check_dtype("out", out, SOURCE_DTYPES)
    check_vector("out", out)
    align = checked_align(format, row_numel)
    if out.numel() % align:
        raise ValueError(
            f"out: expected a multiple of {align} elements, as {format} messages have with "
            f"row_numel {row_numel}, got {out.numel()}; count the gaps between tensors too"
        )
    return layout_of_numel(format, out.numel(), row_numel=row_numel)


def _check_num_bytes(name: str, num_bytes: int, layout: MessageLayout) -> None:
    if num_bytes < HEADER_BYTES:
        raise ValueError(
            f"{name}: expected {layout.num_bytes} bytes a message, got {num_bytes}, too short for "
            f"the header of {HEADER_BYTES}; pass whole messages"
        )
    if num_bytes != layout.num_bytes:
        raise ValueError(
            f"{name}: expected {layout.num_bytes} bytes a message, {layout.format.name} of out's "
            f"{layout.numel} elements, got {num_bytes}; pass messages of that layout"
        )
