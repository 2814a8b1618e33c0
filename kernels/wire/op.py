"""The ops of wire messages: tensors to messages and back, sums of messages; schemas and checks.

| op                    | reads                          | writes      | cpu   | cuda     |
|-----------------------|--------------------------------|-------------|-------|----------|
| pack_message_         | tensors                        | one or more | `cpu` | `pack`   |
| unpack_message_       | messages, one or more          | tensors     | `cpu` | `unpack` |
| reduce_messages_      | messages, one [world, bytes]   | out         | `cpu` | `sum`    |
| reduce_peer_messages_ | messages, world times [bytes]  | out         | `cpu` | `sum`    |

`layout` has the layout, `reference` the definition of all. One launch for any number of tensors or
messages; what is not contiguous, and a message that is not 16-byte aligned, is copied besides where
it is packed or unpacked. Bytes moved an element, of a BF16 tensor:

| fp32 | bf16, fp16 | fp8_row | fp8_1x128 | mxfp8 | mxfp4 | nvfp4 |
|------|------------|---------|-----------|-------|-------|-------|
| 6    | 4          | 3.00    | 3.03      | 3.03  | 2.53  | 2.57  |

The ops write in place, return nothing and are not differentiable; no host waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..aliasing import are_sources, check_apart, check_destinations, check_disjoint
from ..checks import (
    SOURCE_DTYPES,
    check_choice,
    check_contiguous,
    check_device,
    check_dtype,
    check_flag,
    check_integer,
    check_integers,
    check_one_a_tensor,
    check_tensors,
    check_vector,
)
from ..formats.noise import MAX_INDEX, Seed, checked_seed
from ..formats.table import SCALE_RULES, MessageFormat
from ..numbers import Scale, checked_scale, tensor_of
from ..op import Op, call, is_usual, on_first_use
from . import cpu
from .layout import (
    DEFAULT_ROW_NUMEL,
    HEADER_BYTES,
    ROWS_DIMS,
    MessageLayout,
    check_length,
    check_messages,
    checked_align,
    layout_of_bytes,
    layout_of_numel,
    message_format,
    message_layout,
)

_DEFAULT_RULE = "rceil"

_PACK = Op(
    "pack_message_(Tensor(a!) message, Tensor[] tensors, str format, SymInt numel, "
    "SymInt[] offsets, SymInt[] first_indices, float? scale, int row_numel, str rule, "
    "bool power_of_2, SymInt? seed, *, Tensor? scale_tensor=None, Tensor? seed_tensor=None) -> ()",
    cpu.pack_message_,
    on_first_use("wire.pack", "pack_message_"),
)
_UNPACK = Op(
    "unpack_message_(Tensor(a!)[] tensors, Tensor message, str format, SymInt numel, "
    "SymInt[] offsets, float? scale, bool accumulate, int row_numel, *, "
    "Tensor? scale_tensor=None) -> ()",
    cpu.unpack_message_,
    on_first_use("wire.unpack", "unpack_message_"),
)
_SUM_OPTIONS = (
    f"str format, float scale=1.0, bool accumulate=False, SymInt row_numel={DEFAULT_ROW_NUMEL}, *, "
    "Tensor? scale_tensor=None"
)
_REDUCE = Op(
    f"reduce_messages_(Tensor(a!) out, Tensor messages, {_SUM_OPTIONS}) -> ()",
    cpu.reduce_messages_,
    on_first_use("wire.sum", "reduce_messages_"),
)
_REDUCE_PEERS = Op(
    f"reduce_peer_messages_(Tensor(a!) out, Tensor[] messages, {_SUM_OPTIONS}) -> ()",
    cpu.reduce_peer_messages_,
    on_first_use("wire.sum", "reduce_peer_messages_"),
)


def pack_message_(
    message: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    *,
    offsets: Sequence[int] | None = None,
    scale: Scale = 1.0,
    row_numel: int = DEFAULT_ROW_NUMEL,
    rule: str = _DEFAULT_RULE,
    power_of_2: bool = False,
    rounding: str = "nearest",
    seed: Seed | None = None,
    first_indices: Sequence[int] | None = None,
) -> None:
    """Write every byte of `message`: the tensors, times `scale` in FP32, in the format.

    message: uint8, 1-D, contiguous, of `message_layout(format, numels, row_numel=...).num_bytes`;
    or [parts, bytes], a message for each of several ranks. Then the vector of all elements, gaps
    counted, is cut into equal parts, of which each row is the message, as if packed by itself:
    tensors may begin in one and end in another, and `offsets` and indices go on over the cuts. By
    default each has `message_layout(..., parts=parts).num_bytes`.
    tensors: FP32, BF16 or FP16, mixed, any shapes and strides, on the message's device, none of
    their memory the message's. format: fp32, bf16, fp16, fp8_row, fp8_1x128, mxfp8, mxfp4 or nvfp4,
    or another that is in the table. offsets: where each tensor begins, in elements, by default one
    after the other; multiples of the layout's alignment, disjoint. With them a message may be of
    any length that has room. row_numel: elements of a row of fp8_row and nvfp4. rule: of MX's
    scales, "rceil", "floor", "ceil" or "even". power_of_2: FP8's scales are rounded down to powers
    of two.

    scale, seed: numbers, or tensors of one element on the device, FP32 and int64, read there.
    rounding: "nearest", ties to even, or "stochastic", not for fp32 and fp16, with noise of `seed`,
    any 64 bits, and an element's index: its place in its tensor plus the tensor's of
    `first_indices`, by default its offset, and at most 2^63 - 1 less the vector's elements. So a
    tensor's parts round as the tensor does, wherever they are cut between blocks. Raises
    `ValueError` before anything is written, also for an option without effect on this format.
    """
    check_choice("rule", rule, SCALE_RULES)
    power_of_2 = check_flag("power_of_2", power_of_2)
    tensors, named = _checked_tensors(message, tensors)
    seed = checked_seed(rounding, seed, message.device)
    if seed is not None and not message_format(format).has_stochastic:
        raise ValueError(
            f"rounding: expected nearest for {format}, got {rounding!r}; there is no such cast"
        )
    layout, parts, offsets = _placed(message, tensors, format, offsets, row_numel)
    _check_effects(layout.format, rule, power_of_2, seed, first_indices)
    if first_indices is None:
        first_indices = offsets
    first_indices = _checked_indices(tensors, first_indices, parts * layout.numel)
    check_apart({"message": message}, named | {"seed": tensor_of(seed)})
    scale = checked_scale(scale, message.device, message=message)
    options = (scale, row_numel, rule, power_of_2, seed)
    call(_PACK, message, message, tensors, format, layout.numel, offsets, first_indices, *options)


def unpack_message_(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    format: str,
    *,
    offsets: Sequence[int] | None = None,
    scale: Scale = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Fill the tensors from a message, or several: `pack_message_`'s inverse, and its arguments.

    tensor = round(decoded * scale), or with `accumulate` round(float32(tensor) + decoded * scale):
    in FP32, no fused multiply-add, rounded once, to nearest even. The tensors share no memory with
    the message or each other. Nobody looks at the header, on a GPU or a CPU: the host would wait
    for it, and `read_header` does. Raises `ValueError` before anything is written.
    """
    tensors, named = _checked_tensors(message, tensors)
    layout, _, offsets = _placed(message, tensors, format, offsets, row_numel)
    check_apart({"message": message}, named)
    check_destinations("tensors", tensors)
    scale = checked_scale(scale, message.device, tensors=tensors)
    accumulate = check_flag("accumulate", accumulate)
    if tensors:
        options = (scale, accumulate, row_numel)
        call(_UNPACK, message, tensors, message, format, layout.numel, offsets, *options)


def reduce_messages_(
    out: torch.Tensor,
    messages: torch.Tensor,
    format: str,
    *,
    scale: Scale = 1.0,
    accumulate: bool = False,
    row_numel: int = DEFAULT_ROW_NUMEL,
) -> None:
    """Decode one message per rank and sum them into `out`: in FP32, in rank order, rounded once.

    out: 1-D, contiguous, FP32, BF16 or FP16, of as many elements as a message has, gaps counted.
    messages: uint8 [world, bytes of a message], contiguous, world >= 1, on the device of `out` and
    not overlapping it. format, scale: as for `pack_message_`; row_numel: that of the sender.
    Nobody looks at the headers, on a GPU or a CPU: `read_header` does, and the host waits.

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
    if messages.dim() != ROWS_DIMS or messages.shape[0] == 0:
        raise ValueError(
            f"messages: expected shape (world, {layout.num_bytes}) with world >= 1, got "
            f"{tuple(messages.shape)}; pass one row per rank"
        )
    _check_num_bytes("messages", messages.shape[1], layout)
    check_contiguous("messages", messages)
    check_apart({"out": out}, {"messages": messages})
    scale = checked_scale(scale, out.device, out=out)
    accumulate = check_flag("accumulate", accumulate)
    call(_REDUCE, out, out, messages, format, scale, accumulate, row_numel)


def reduce_peer_messages_(
    out: torch.Tensor,
    messages: Sequence[torch.Tensor],
    format: str,
    *,
    scale: Scale = 1.0,
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
    if not is_usual(_are_messages, out, messages, layout.num_bytes):
        named = {f"messages[{rank}]": message for rank, message in enumerate(messages)}
        for name, message in named.items():
            check_dtype(name, message, (torch.uint8,))
            check_device(name, message, out.device)
            check_vector(name, message)
            _check_num_bytes(name, message.shape[0], layout)
        check_apart({"out": out}, named)
    scale = checked_scale(scale, out.device, out=out)
    accumulate = check_flag("accumulate", accumulate)
    call(_REDUCE_PEERS, out, out, messages, format, scale, accumulate, row_numel)


def _check_effects(
    form: MessageFormat,
    rule: str,
    power_of_2: bool,
    seed: Seed | None,
    first_indices: Sequence[int] | None,
) -> None:
    """Raise `ValueError` for an option that would change nothing."""
    if rule != _DEFAULT_RULE and not form.has_rule:
        raise ValueError(
            f"rule: expected {_DEFAULT_RULE} for {form.name}, got {rule}; only MX's "
            "scales have rules"
        )
    if power_of_2 and not form.has_power_of_2:
        raise ValueError(
            f"power_of_2: expected False for {form.name}, got True; only FP8's scales "
            "can be rounded"
        )
    if first_indices is not None and seed is None:
        raise ValueError(
            "first_indices: expected None with nearest rounding, got a list; leave it out, or "
            "round stochastically"
        )


def _checked_tensors(
    message: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors, and by their names those that may share memory with the message."""
    check_messages("message", message)
    tensors = check_tensors("tensors", tensors)
    if is_usual(are_sources, message, tensors, SOURCE_DTYPES):
        return tensors, {}
    named = {f"tensors[{index}]": tensor for index, tensor in enumerate(tensors)}
    for name, tensor in named.items():
        check_dtype(name, tensor, SOURCE_DTYPES)
        check_device(name, tensor, message.device)
    return tensors, named


def _placed(
    message: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    format: str,
    offsets: Sequence[int] | None,
    row_numel: int,
) -> tuple[MessageLayout, int, Sequence[int]]:
    """The layout of each message, how many there are, and where in all of them the tensors are."""
    numels = [tensor.numel() for tensor in tensors]
    parts = message.shape[0] if message.dim() == ROWS_DIMS else 1
    if offsets is None:
        layout = message_layout(format, numels, row_numel=row_numel, parts=parts)
        check_length("message", message, layout)
        return layout, parts, layout.offsets
    layout = layout_of_bytes(format, message.shape[-1], row_numel=row_numel)
    offsets = check_integers("offsets", offsets)
    check_one_a_tensor("offsets", offsets, tensors)
    _check_offsets(numels, offsets, layout.align_numel, parts * layout.numel)
    return layout, parts, offsets


def _check_offsets(
    numels: Sequence[int], offsets: Sequence[int], align: int, whole_numel: int
) -> None:
    for index, (numel, offset) in enumerate(zip(numels, offsets, strict=True)):
        if offset < 0 or offset % align or offset + numel > whole_numel:
            raise ValueError(
                f"offsets[{index}]: expected a multiple of {align}, with room for {numel} of "
                f"{whole_numel} elements, got {offset}; see message_layout"
            )
    check_disjoint(numels, offsets)


def _checked_indices(
    tensors: Sequence[torch.Tensor], first_indices: Sequence[int], whole_numel: int
) -> list[int]:
    """The first indices, so small that even the gaps after tensors, which are encoded, have one."""
    first_indices = check_integers("first_indices", first_indices)
    check_one_a_tensor("first_indices", first_indices, tensors)
    last = MAX_INDEX - whole_numel
    for index, first_index in enumerate(first_indices):
        if type(first_index) is not int or not 0 <= first_index <= last:
            check_integer(f"first_indices[{index}]", first_index, 0, last)
    return first_indices


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
