"""Calls of every public op on fixed inputs, and the SHA-256 of all that each writes.

    python -m sidestream.tests.kernels.goldens      writes goldens.json anew

A change of a hash is a change of bits that users have: it needs a line in CHANGELOG.md.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sidestream import kernels

FILE = Path(__file__).parent / "goldens.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 2**63 + 11}
MESSAGES = ("fp32", "bf16", "fp16", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
SHAPE = (6, 1100)

Calls = Iterator[tuple[str, Callable[[], Any]]]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1):
    """Numbers of 24 binades and both signs; with an odd seed NaN, infinity and subnormals too."""
    numel = torch.Size(shape).numel()
    bits = torch.arange(numel, dtype=torch.int64) * 0x9E3779B1 + seed * 0x85EBCA6B
    bits = ((bits ^ (bits >> 15)) * 0x2C1B3C6D) & 0xFFFF_FFFF
    bits = (bits ^ (bits >> 12)) & 0x81FF_FFFF
    bits = bits + (((bits >> 25) % 24 + 110) << 23)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits)
    made = bits.to(torch.int32).view(torch.float32).clone()
    if seed % 2:
        for at, special in enumerate(
            (float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 3e38)
        ):
            made[200 * at :: 2011] = special
    return made.view(shape).to(dtype)


def _tensors(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    shapes = ((130, 17), (5,), (0,), (2, 3, 700), (1,))
    return [values(shape, dtype, seed + 2 * at) for at, shape in enumerate(shapes)]


def _many_tensors() -> Calls:
    for (name, dtype), (flat_name, flat_dtype), accumulate in itertools.product(
        DTYPES.items(), DTYPES.items(), (False, True)
    ):

        def pack(dtype=dtype, flat_dtype=flat_dtype, accumulate=accumulate):
            flat = values((8192,), flat_dtype, 8)
            kernels.pack_(
                flat,
                _tensors(dtype, 3),
                [0, 2304, 2500, 2560, 7000],
                scale=0.3,
                accumulate=accumulate,
            )
            return flat

        def unpack(dtype=dtype, flat_dtype=flat_dtype, accumulate=accumulate):
            made = _tensors(dtype, 2)
            kernels.unpack_(
                made,
                values((8192,), flat_dtype, 7),
                [0, 2304, 2500, 2560, 7000],
                scale=0.3,
                accumulate=accumulate,
            )
            return made

        def add(dtype=dtype, flat_dtype=flat_dtype, accumulate=accumulate):
            out = values((1300,), flat_dtype, 8)
            kernels.reduce_(out, values((5, 1300), dtype, 9), scale=0.2, accumulate=accumulate)
            return out

        suffix = f"{name} {flat_name}{' accumulate' * accumulate}"
        yield f"pack_ {suffix}", pack
        yield f"unpack_ {suffix}", unpack
        yield f"reduce_ {suffix}", add


def _casts() -> Calls:
    for to, (name, dtype) in itertools.product(
        ("bf16", "fp16", "e4m3", "e5m2", "e2m1", "e8m0", "e4m3fnuz"), DTYPES.items()
    ):
        x = values(SHAPE, dtype)
        yield f"cast {to} {name}", lambda x=x, to=to: kernels.cast(x, to)
        yield (
            f"cast_back {to} {name}",
            lambda x=x, to=to, dtype=dtype: kernels.cast_back(kernels.cast(x, to), to, dtype),
        )
        if to not in ("fp16", "e8m0"):
            yield (
                f"cast {to} {name} stochastic",
                lambda x=x, to=to: kernels.cast(x, to, first_index=37, **NOISE),
            )


def _fp8() -> Calls:
    for scaling, element, (name, dtype), power in itertools.product(
        ("tensor", "row", "1x128", "128x128"),
        ("e4m3", "e5m2", "e4m3fnuz"),
        DTYPES.items(),
        (False, True),
    ):
        x = values(SHAPE, dtype)
        options = {"scaling": scaling, "element": element, "power_of_2": power}

        def there(x=x, options=options):
            return kernels.quantize_fp8(x, **options)

        def back(x=x, options=options, dtype=dtype):
            made = kernels.quantize_fp8(x, **options)
            return kernels.dequantize_fp8(*made, scaling=options["scaling"], dtype=dtype)

        suffix = f"{scaling} {element} {name}{' power of 2' * power}"
        yield f"quantize_fp8 {suffix}", there
        yield f"dequantize_fp8 {suffix}", back

    def delayed():
        amax = torch.zeros(())
        made = kernels.quantize_fp8(values(SHAPE, seed=2), scale=torch.tensor(3.7), amax=amax)
        return (*made, amax)

    yield "quantize_fp8 delayed", delayed
    for algorithm in ("max", "most_recent"):

        def update(algorithm=algorithm):
            history, scales = values((40, 7)).abs(), values((40,), seed=2).abs()
            kernels.update_fp8_scales_(history, scales, margin=2, algorithm=algorithm)
            return history, scales

        yield f"update_fp8_scales_ {algorithm}", update


def _mx() -> Calls:
    for element, rule, swizzled, stochastic in itertools.product(
        ("e4m3", "e5m2", "e2m1"), ("rceil", "floor", "ceil", "even"), (False, True), (False, True)
    ):
        noise = NOISE | {"first_index": 21} if stochastic else {}
        options = {"element": element, "swizzled": swizzled}

        def there(options=options, rule=rule, noise=noise):
            return [
                kernels.quantize_mx(values(SHAPE, dtype), rule=rule, **options, **noise)
                for dtype in DTYPES.values()
            ]

        def back(options=options, rule=rule, noise=noise):
            made = kernels.quantize_mx(values(SHAPE), rule=rule, **options, **noise)
            return [
                kernels.dequantize_mx(*made, dtype=dtype, row_numel=SHAPE[1], **options)
                for dtype in DTYPES.values()
            ]

        suffix = f"{element} {rule}{' swizzled' * swizzled}{' stochastic' * stochastic}"
        yield f"quantize_mx {suffix}", there
        yield f"dequantize_mx {suffix}", back


def _nvfp4() -> Calls:
    for variant, hadamard, swizzled, stochastic, seed in itertools.product(
        ("te", "torchao"), (False, True), (False, True), (False, True), (1, 2)
    ):
        noise = NOISE | {"first_index": 21} if stochastic else {}
        options = {"variant": variant, "swizzled": swizzled}

        def there(options=options, hadamard=hadamard, noise=noise, seed=seed):
            return [
                kernels.quantize_nvfp4(
                    values(SHAPE, dtype, seed), hadamard=hadamard, **options, **noise
                )
                for dtype in DTYPES.values()
            ]

        def back(options=options, hadamard=hadamard, noise=noise, seed=seed):
            made = kernels.quantize_nvfp4(
                values(SHAPE, seed=seed), hadamard=hadamard, **options, **noise
            )
            return [
                kernels.dequantize_nvfp4(*made, dtype=dtype, row_numel=SHAPE[1], **options)
                for dtype in DTYPES.values()
            ]

        suffix = f"{variant}{' hadamard' * hadamard}{' swizzled' * swizzled}"
        suffix += f"{' stochastic' * stochastic} {seed}"
        yield f"quantize_nvfp4 {suffix}", there
        yield f"dequantize_nvfp4 {suffix}", back
    for variant, hadamard in itertools.product(("te", "torchao"), (False, True)):

        def as_nan(variant=variant, hadamard=hadamard):
            return [
                kernels.quantize_nvfp4(
                    values(SHAPE, dtype), variant=variant, hadamard=hadamard, nonfinite="nan"
                )
                for dtype in DTYPES.values()
            ]

        yield f"quantize_nvfp4 {variant}{' hadamard' * hadamard} nan", as_nan
    for name, dtype in DTYPES.items():
        x = values(SHAPE, dtype, 2)
        yield (
            f"amax_nvfp4 {name}",
            lambda x=x: [kernels.amax_nvfp4(x, hadamard=hadamard) for hadamard in (False, True)],
        )
        yield (
            f"hadamard16 {name}",
            lambda x=x: [kernels.hadamard16(x, inverse=inverse) for inverse in (False, True)],
        )
    scales = torch.arange(130 * 7, dtype=torch.int64).remainder(251).to(torch.uint8).view(130, 7)
    yield "swizzle_scales", lambda: kernels.swizzle_scales(scales)
    yield (
        "unswizzle_scales",
        lambda: kernels.unswizzle_scales(kernels.swizzle_scales(scales), 130, 7),
    )


def _grouped() -> Calls:
    for name, dtype in DTYPES.items():
        x, ends = values((200, 96), dtype), torch.tensor([70, 70, 75, 190])
        for element in ("e4m3", "e2m1"):
            yield (
                f"quantize_mx_grouped {element} {name}",
                lambda x=x, ends=ends, element=element: [
                    kernels.quantize_mx_grouped(x, ends, element=element, **noise)
                    for noise in ({}, NOISE | {"first_index": 21})
                ],
            )
        yield (
            f"quantize_fp8_grouped {name}",
            lambda x=x, ends=ends: [
                kernels.quantize_fp8_grouped(x, ends, power_of_2=power) for power in (False, True)
            ],
        )
        yield (
            f"quantize_nvfp4_grouped {name}",
            lambda x=x, ends=ends: [
                kernels.quantize_nvfp4_grouped(x, ends, **noise)
                for noise in ({}, NOISE | {"first_index": 21})
            ],
        )


def _message_options(form: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {}
    if form not in ("fp32", "fp16"):
        yield " stochastic", NOISE | {"first_indices": [5, 10**6, 0, 16, 7]}
    if form in ("mxfp8", "mxfp4"):
        yield from ((f" {rule}", {"rule": rule}) for rule in ("floor", "ceil", "even"))
    if form in ("fp8_row", "fp8_1x128"):
        yield " power of 2", {"power_of_2": True}


def _packed(form: str, dtype: torch.dtype, which: int, **options: Any) -> torch.Tensor:
    tensors = _tensors(dtype, which)
    layout = kernels.message_layout(form, [one.numel() for one in tensors], row_numel=256)
    message = torch.empty(layout.num_bytes, dtype=torch.uint8)
    kernels.pack_message_(message, tensors, form, row_numel=256, **options)
    return message


def _messages() -> Calls:
    for form, (name, dtype) in itertools.product(MESSAGES, DTYPES.items()):
        for suffix, options in _message_options(form):
            yield (
                f"pack_message_ {form} {name}{suffix}",
                lambda form=form, dtype=dtype, options=options: _packed(
                    form, dtype, 3, scale=0.7, **options
                ),
            )

        def unpack(form=form, dtype=dtype):
            made = _tensors(dtype, 4)
            message = _packed(form, dtype, 5)
            kernels.unpack_message_(made, message, form, row_numel=256, scale=0.7, accumulate=True)
            return made

        def add(form=form, dtype=dtype):
            messages = torch.stack([_packed(form, dtype, seed) for seed in (2, 3, 4, 5, 6)])
            numel = kernels.read_header(messages[0], row_numel=256)[1]
            made = [values((numel,), dtype, 6) for _ in range(2)]
            options = {"row_numel": 256, "scale": 0.2}
            kernels.reduce_messages_(made[0], messages, form, **options)
            kernels.reduce_peer_messages_(made[1], list(messages), form, accumulate=True, **options)
            return made

        yield f"unpack_message_ {form} {name}", unpack
        yield f"reduce_messages_ {form} {name}", add


def _optimizers() -> Calls:
    numel = 5000
    for (name, dtype), compute, segments in itertools.product(
        DTYPES.items(), (None, torch.bfloat16, torch.float8_e4m3fn), (False, True)
    ):

        def shards(dtype=dtype, compute=compute, segments=segments):
            options: dict[str, Any] = {"weight_decay": 0.1, "factor": torch.tensor(0.5)}
            if segments:
                options["segments"] = kernels.Segments(
                    [0, 1600, 4000], torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.1, 0.0, 0.3])
                )
            if compute is not None:
                options["compute"] = torch.zeros(numel, dtype=compute)
            if compute is torch.float8_e4m3fn:
                options |= {"compute_scale": torch.tensor(3.0), "amax": torch.zeros(())}
            tensors = [values((numel,), seed=seed) for seed in (2, 4, 6)]
            tensors[2].abs_()
            return tensors, values((numel,), dtype, 8), options

        def adamw(shards=shards):
            (param, first, second), grad, options = shards()
            lr, step = torch.tensor(0.01), torch.tensor(7)
            kernels.flat_adamw_(param, grad, first, second, lr, step, **options)
            return param, first, second, options.get("compute"), options.get("amax")

        def sgd(shards=shards):
            (param, first, _), grad, options = shards()
            lr, step = torch.tensor(0.01), torch.tensor(7)
            kernels.flat_sgd_(param, grad, first, lr, step, momentum=0.9, nesterov=True, **options)
            return param, first, options.get("compute"), options.get("amax")

        suffix = f"{name} {compute}{' segments' * segments}"
        yield f"flat_adamw_ {suffix}", adamw
        yield f"flat_sgd_ {suffix}", sgd


def _transposed() -> Calls:
    """What is no cast of x or of its transpose, and one call of what is."""
    shape = (96, 160)
    for name, dtype in DTYPES.items():
        x = values(shape, dtype)
        yield (
            f"quantize_nvfp4_with_transpose square {name}",
            lambda x=x: kernels.quantize_nvfp4_with_transpose(x, square=True),
        )
    x = values(shape, torch.bfloat16, 2)
    for function in (
        kernels.quantize_mx_with_transpose,
        kernels.quantize_nvfp4_with_transpose,
        kernels.amax_nvfp4_with_transpose,
        kernels.quantize_fp8_with_transpose,
    ):
        yield f"{function.__name__} bf16", lambda function=function: function(x)


def calls() -> dict[str, Callable[[], Any]]:
    """All, by their names."""
    families = (
        *(_many_tensors, _casts, _fp8, _mx, _nvfp4, _messages, _optimizers, _grouped),
        _transposed,
    )
    return dict(call for family in families for call in family())


def digest(made: Any) -> str:
    """Of the bytes, shapes and dtypes of tensors, in lists of lists."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            if part.dtype in DTYPES.values():
                part = torch.where(part.isnan(), torch.nan, part)  # processors differ in its bits
            found.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif part is not None:
            for one in part:
                add(one)

    add(made)
    return found.hexdigest()[:16]


if __name__ == "__main__":
    made = {name: digest(call()) for name, call in calls().items()}
    FILE.write_text(json.dumps(made, indent=0) + "\n")
    print(len(made), "hashes")
