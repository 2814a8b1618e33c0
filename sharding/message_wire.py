"""Gradients as wire messages of the kernels: codes and their scales, a message for each rank.

    pack      v = gradients + residual, transformed; a message is codes of v with their scales
    residual  v - what the messages say, transformed back: added to the next gradients
    reduce    what the messages of all ranks say, summed in FP32 in rank order, transformed back

The noise of stochastic rounding depends on the exchange, the rank and the element's place in the
model. So neither units nor ZeRO levels change a bit, and no two ranks make the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import (
    ALIGN_NUMEL,
    hadamard16,
    message_layout,
    pack_message_,
    reduce_,
    reduce_peer_messages_,
    unpack_message_,
)
from ..kernels.checks import check_device, check_one, check_tensor
from ..kernels.formats.noise import signed_seed
from .arguments import require_flag, require_number
from .wire import PlainWire, Source, Wire

FORMATS: Mapping[str, str] = {
    **{name: name for name in ("fp32", "bf16", "fp16")},
    "fp8": "fp8_row",
    **{name: name for name in ("fp8_1x128", "mxfp8", "mxfp4", "nvfp4")},
}
"""What wires and policies call the formats of messages, and what the kernels do."""

_RESIDUALS = (torch.float32, torch.bfloat16)
_MASK_64 = 2**64 - 1


def message_bytes(format: str, numel: int) -> int:
    """Bytes of a message of `numel` elements, a multiple of `align_of(format)`, header included."""
    return message_layout(FORMATS[format], [numel]).num_bytes


def align_of(format: str) -> int:
    """What the places of tensors in a message are multiples of, in elements."""
    return message_layout(FORMATS[format], []).align_numel


def require_format(option: str, format: object, allowed: Sequence[str]) -> str:
    """`format`, which has to be one of `allowed`; raises `ValueError` naming them."""
    if not isinstance(format, str) or format not in allowed:
        names = ", ".join(f"'{name}'" for name in allowed)
        raise ValueError(f"{option}: expected one of {names}, got {format!r}; pass one of them")
    return format


class MessageWire(Wire):
    """Gradients in a format with scales, or rounded stochastically.

    Sent for an element, headers apart: 1.03 bytes with "mxfp8" and "fp8_1x128", 1.004 with "fp8" (a
    scale for 1,024 elements), 0.53 with "mxfp4", 0.566 with "nvfp4". The largest error to nearest:
    with 8 bits 2^-4 of an element, or 2^-17 of the largest magnitude that shares its scale; with 4
    bits 0.18 ("nvfp4", or 2^-17 of the largest of 1,024 elements) or 0.2 ("mxfp4") of that. Twice
    that with noise, whose expected error is 0, but for what exceeds the scale of an "nvfp4" block
    that was rounded down: up to 6 % of it is lost.

    Args:
        format: "bf16", "fp16", "fp8", "fp8_1x128", "mxfp8", "mxfp4" or "nvfp4"; "fp32" is a
            `PlainWire`'s.
        rounding: "nearest", or "stochastic", with noise of the exchange, the rank and the element's
            place in the model. None: stochastic for 4 bits, where errors that do not cancel out
            keep training from its minimum.
        hadamard: transform blocks of 16 gradients before, and their sum back after
            (`kernels.hadamard16`): outliers spread over their block.
        error_feedback: dtype, FP32 or BF16, of what each rank's own rounding has lost so far, an
            element of the model each, which is added to its next gradients. None: it is lost.
        seed: of the noise, any 64 bits.
        seed_offset: int64 tensor of one element on the device of the gradients, added to the seed
            of every exchange where the message is packed; no host reads it. A captured CUDA graph,
            in which exchanges keep their numbers, draws new noise once it has changed: advance it
            between steps. None: 0.

    Vectors, such as norms and biases, travel as `for_vectors` says. Of sums over the ranks of one
    axis that travel along another one in messages, the error is not fed back.

    Raises:
        ValueError: an unknown format; noise or feedback that the format has not; an offset of
            another dtype or number of elements, or without noise.
        TypeError: an option of another type.
    """

    dtype = torch.uint8

    def __init__(
        self,
        format: str,
        *,
        rounding: str | None = None,
        hadamard: bool = False,
        error_feedback: torch.dtype | None = None,
        seed: int = 0,
        seed_offset: Tensor | None = None,
    ) -> None:
        self.format = require_format("MessageWire: format", format, list(FORMATS))
        form = message_layout(FORMATS[format], []).format
        if rounding is None:
            rounding = "stochastic" if form.element.stored_bits == 4 else "nearest"  # noqa: PLR2004
        require_format("MessageWire: rounding", rounding, ["nearest", "stochastic"])
        if rounding == "stochastic" and not form.has_stochastic:
            raise ValueError(
                f"MessageWire: expected rounding='nearest' for {format!r}, got {rounding!r}; there "
                "is no such cast; 'bf16' and the formats with scales have noise"
            )
        require_flag("MessageWire: hadamard", hadamard)
        require_number("MessageWire: seed", seed, "a whole number", lambda n: isinstance(n, int))
        self.rounding, self.hadamard, self.seed = rounding, hadamard, seed
        self.seed_offset = _checked_offset(rounding, seed_offset)
        self.residual_dtype = _checked_residual(format, error_feedback)
        self.align_numel = align_of(format)
        # What is not finite spoils its block, or comes out of the transform, behind the tensor too.
        self.fills_gaps = hadamard or form.scale_dtype is not None
        self.scratch_bytes = 8 if hadamard or error_feedback is not None else 0
        more = {
            "stochastic": rounding == "stochastic",
            f"seed {seed}": rounding == "stochastic" and seed,
            "seed offset": seed_offset is not None,
            "hadamard": hadamard,
            f"feedback in {error_feedback}".replace("torch.", ""): error_feedback is not None,
        }
        self.name = ", ".join([format, *(name for name, is_on in more.items() if is_on)])

    @property
    def for_vectors(self) -> Wire:
        """BF16 where blocks share a scale: vectors are few bytes, and their gradients matter."""
        has_scales = message_layout(FORMATS[self.format], []).format.scale_dtype is not None
        return PlainWire(torch.bfloat16) if has_scales else self

    def part_numel(self, numel: int) -> int:
        """Bytes of a message."""
        return message_bytes(self.format, -(-numel // self.align_numel) * self.align_numel)

    def pack(self, sent: Tensor, source: Source, parts: int) -> None:
        """See `kernels.pack_message_`."""
        messages = sent.view(parts, -1)
        if self.residual_dtype is None and not self.hadamard:
            self._encode(messages, source, *source.present())
            return
        flat = torch.empty(source.numel, dtype=torch.float32, device=sent.device)
        source.fill(flat)
        residual = source.residual
        if residual is not None:
            flat.add_(residual)
        made, multiple = flat, 1
        if self.hadamard:
            # In place, unless what is lost will be told by the difference. A tensor's last block
            # is transformed with the zeros behind it, all of which it takes to get it back.
            made = hadamard16(flat, out=flat if residual is None else None)
            multiple = ALIGN_NUMEL
        self._encode(messages, source, *source.places.cut(made, multiple=multiple))
        if residual is not None:
            residual.copy_(flat.sub_(self._decoded(messages, made)))
            # Whatever is not finite is told of; it must not come again in every later exchange.
            residual.masked_fill_(~residual.isfinite(), 0.0)
            source.places.clear_gaps(residual, self.align_numel)

    def _encode(
        self, messages: Tensor, source: Source, tensors: Sequence[Tensor], offsets: Sequence[int]
    ) -> None:
        noise: dict[str, Any] = {}
        if self.rounding == "stochastic":
            indices = source.places.indices_at(offsets)
            seed = mixed(self.seed, source.noise_key)
            noise = {"seed": seed, "first_indices": indices}
            if self.seed_offset is not None:
                check_device("MessageWire: seed_offset", self.seed_offset, messages.device)
                noise["seed"] = self.seed_offset + signed_seed(seed)
        pack_message_(
            messages,
            tensors,
            FORMATS[self.format],
            offsets=offsets,
            rounding=self.rounding,
            **noise,
        )

    def _decoded(self, messages: Tensor, values: Tensor) -> Tensor:
        """What `messages` say, in the memory of `values` if they were transformed."""
        decoded = values if self.hadamard else torch.empty_like(values)
        unpack_message_([decoded], messages, FORMATS[self.format], offsets=[0])
        return hadamard16(decoded, inverse=True, out=decoded) if self.hadamard else decoded

    def reduce(
        self,
        out: Tensor,
        rows: Sequence[Tensor],
        *,
        table: Tensor | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        """See `kernels.reduce_peer_messages_`."""
        form = FORMATS[self.format]
        if not self.hadamard:
            reduce_peer_messages_(out, rows, form, scale=scale, accumulate=accumulate)
            return
        total = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        reduce_peer_messages_(total, rows, form)
        hadamard16(total, inverse=True, out=total)
        reduce_(out, None, scale=scale, accumulate=accumulate, rows=[total])


def _checked_residual(format: str, dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    if dtype not in _RESIDUALS:
        raise TypeError(
            "MessageWire: error_feedback: expected None, torch.float32 or torch.bfloat16, got "
            f"{dtype!r}; pass the dtype of what is kept for each element"
        )
    if format == "fp32":
        raise ValueError(
            "MessageWire: error_feedback: expected None with 'fp32', which loses nothing to feed "
            f"back, got {dtype}; leave it out, or pass a format that rounds"
        )
    return dtype


def _checked_offset(rounding: str, offset: Tensor | None) -> Tensor | None:
    if offset is None:
        return None
    if rounding != "stochastic":
        raise ValueError(
            f"MessageWire: seed_offset: expected None with rounding={rounding!r}, got a tensor; "
            "leave it out, or round stochastically"
        )
    check_tensor("MessageWire: seed_offset", offset)
    check_one("MessageWire: seed_offset", offset, (torch.int64,), offset.device)
    return offset


def mixed(*values: int) -> int:
    """64 bits that look random, of integers in their order.

    The finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, figure 16.
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E37_79B9_7F4A_7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK_64
        state ^= state >> 31
    return state
