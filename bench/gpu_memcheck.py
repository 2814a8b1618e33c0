"""Runs each kernel once on tensors of awkward sizes; made to be run under compute-sanitizer.

    python3 -m sidestream.bench.gpu_memcheck         aligned and unaligned, full tiles and tails
    python3 -m sidestream.bench.gpu_memcheck --few   the same kernels on fewer sizes, aligned
    python3 -m sidestream.bench.gpu_memcheck casts   one of the families, since compiling takes long

Says what it goes on to, so that one sees how far it came.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels import (
    Segments,
    amax_nvfp4,
    cast,
    cast_back,
    dequantize_fp8,
    dequantize_mx,
    dequantize_nvfp4,
    flat_adamw_,
    flat_sgd_,
    hadamard16,
    l2_norm_,
    message_layout,
    pack_,
    pack_message_,
    quantize_fp8,
    quantize_mx,
    quantize_nvfp4,
    reduce_,
    reduce_messages_,
    reduce_peer_messages_,
    unpack_,
    unpack_message_,
    update_fp8_scales_,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 3}
STARTED = "checking"
"""How a line begins that says what comes next: the device works, and so does what watches it."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """On what each kernel runs. shifts: elements by which memory begins late."""

    numels: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    shifts: tuple[int, ...]


ALL = Sizes(
    numels=(1, 127, 2048, 4097, 9000),
    # Rows of whole blocks and not; more and fewer than a program has.
    shapes=((4, 2048), (3, 1030), (2, 37)),
    shifts=(0, 1),
)
FEW = Sizes(numels=(127, 4097), shapes=((4, 2048), (3, 1030)), shifts=(0,))


def run(device: torch.device, sizes: Sizes = ALL, families: Iterable[str] | None = None) -> None:
    """The `families`, by default all: aligned and unaligned, full tiles and tails."""
    torch.ones(1, device=device).add_(1.0)
    _wait(device)
    for name in families or FAMILIES:
        for shift in sizes.shifts:
            print(f"{STARTED} {name}, memory that begins {shift} late", flush=True)
            FAMILIES[name](device, sizes, shift)
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _many_tensors(device: torch.device, sizes: Sizes, shift: int) -> None:
    tensors = [
        torch.ones(numel + shift, dtype=dtype, device=device)[shift:]
        for dtype in DTYPES
        for numel in sizes.numels
    ]
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end + shift)
        end += -(-(tensor.numel() + shift) // 128) * 128
    flat = torch.zeros(end, device=device)
    for accumulate in (False, True):
        pack_(flat, tensors, offsets, scale=0.5, accumulate=accumulate)
        unpack_(tensors, flat, offsets, accumulate=accumulate)
    for dtype in DTYPES:
        parts = torch.ones(3 * 4099 + shift, dtype=dtype, device=device)[shift:].view(3, 4099)
        reduce_(torch.zeros(4099, device=device), parts, accumulate=True)
    norm = torch.zeros((), device=device)
    l2_norm_(norm, tensors, found_inf=torch.zeros((), device=device))


def _messages(device: torch.device, sizes: Sizes, shift: int) -> None:
    numels = sizes.numels
    tensors = [torch.ones(numel + shift, device=device)[shift:] for numel in numels]
    for name in ("bf16", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"):
        layout = message_layout(name, numels, row_numel=128)
        memory = torch.empty(2 * layout.num_bytes + shift, dtype=torch.uint8, device=device)
        messages = memory[shift:].view(2, layout.num_bytes)
        for message in messages:
            pack_message_(message, tensors, name, row_numel=128)
        unpack_message_(tensors, messages[0], name, row_numel=128, accumulate=True)
        out = torch.zeros(layout.numel + shift, device=device)[shift:]
        reduce_messages_(out, messages, name, row_numel=128, accumulate=True)
        reduce_peer_messages_(out, list(messages), name, row_numel=128)


def _matrices(device: torch.device, sizes: Sizes, shift: int) -> Iterator[torch.Tensor]:
    for rows, columns in sizes.shapes:
        memory = torch.ones(rows * columns + shift, dtype=torch.bfloat16, device=device)
        yield memory[shift:].view(rows, columns)


def _casts(device: torch.device, sizes: Sizes, shift: int) -> None:
    for x in _matrices(device, sizes, shift):
        _casts_of(x)


def _casts_of(x: torch.Tensor) -> None:
    for to in ("bf16", "fp16", "e4m3", "e5m2", "e2m1", "e8m0"):
        cast_back(cast(x, to), to)
    cast(x, "e2m1", **NOISE)
    cast(x, "bf16", **NOISE)
    for scaling in ("tensor", "row", "1x128", "128x128"):
        dequantize_fp8(*quantize_fp8(x, scaling=scaling), scaling=scaling)
    history, scales = torch.ones(3, 5, device=x.device), torch.ones(3, device=x.device)
    quantize_fp8(x, scale=scales[1], amax=history[1, 0])
    update_fp8_scales_(history, scales)


def _blocks(device: torch.device, sizes: Sizes, shift: int) -> None:
    for x in _matrices(device, sizes, shift):
        _blocks_of(x)


def _blocks_of(x: torch.Tensor) -> None:
    row_numel = x.shape[-1]
    for swizzled in (False, True):
        for element in ("e4m3", "e2m1"):
            made = quantize_mx(x, element=element, swizzled=swizzled)
            dequantize_mx(*made, element=element, swizzled=swizzled, row_numel=row_numel)
        parts = quantize_nvfp4(x, swizzled=swizzled, hadamard=swizzled)
        dequantize_nvfp4(*parts, swizzled=swizzled, row_numel=row_numel)
    quantize_mx(x, element="e2m1", **NOISE)
    quantize_nvfp4(x, variant="torchao", **NOISE)
    amax_nvfp4(x)
    hadamard16(x, inverse=True)


def _optimizers(device: torch.device, sizes: Sizes, shift: int) -> None:
    numel = 9000
    param, grad, first, second = (
        torch.ones(numel + shift, device=device)[shift:] for _ in range(4)
    )
    codes = torch.zeros(numel + shift, dtype=torch.uint8, device=device)[shift:]
    one, step = torch.ones((), device=device), torch.ones((), device=device)
    segments = Segments([0, 4100, 8999], *(torch.ones(3, device=device) for _ in range(2)))
    flat_adamw_(param, grad, first, second, one, step, segments=segments)
    flat_adamw_(
        param,
        grad,
        first,
        second,
        one,
        step,
        compute=codes,
        compute_scale=one,
        amax=torch.zeros((), device=device),
    )
    flat_sgd_(param, grad.bfloat16(), first, one, step, momentum=0.9, compute=codes.bfloat16())


FAMILIES: Mapping[str, Callable[[torch.device, Sizes, int], None]] = {
    "tensors": _many_tensors,
    "messages": _messages,
    "casts": _casts,
    "blocks": _blocks,
    "optimizers": _optimizers,
}


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--few", action="store_true", help="fewer sizes of the same kernels")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(
            f"families: expected some of {', '.join(FAMILIES)}, got {', '.join(unknown)}; "
            "name those, or none to run all"
        )
    run(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        FEW if options.few else ALL,
        options.families,
    )


if __name__ == "__main__":
    main()
