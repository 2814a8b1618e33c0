"""Owns the cases of casts, block formats and the Hadamard transform in `make gpu-check`.

All run on one matrix of BF16 (FP32 where said). That results agree is tried on its first rows, on
the device and on the CPU; `tests/kernels` tries all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..kernels import (
    amax_nvfp4,
    cast,
    dequantize_fp8,
    dequantize_mx,
    dequantize_nvfp4,
    hadamard16,
    quantize_fp8,
    quantize_mx,
    quantize_nvfp4,
    registry,
)
from .gpu_case import OURS, Case, same

ROW_NUMEL = 4096
CHECKED_ROWS = 8
NOISE: dict[str, Any] = {"rounding": "stochastic", "seed": 1}
AMAX = 8.0

Function = Callable[[torch.Tensor], Any]


def cases(device: torch.device, numel: int) -> Iterator[Case]:
    """One at a time, of about `numel` elements each."""
    rows = max(numel // ROW_NUMEL, 2 * CHECKED_ROWS)
    brain = torch.randn(rows, ROW_NUMEL, device=device).bfloat16()
    yield from _cast_cases(brain)
    yield from _fp8_cases(brain)
    yield from _mx_cases(brain)
    yield from _nvfp4_cases(brain)


def _cast_cases(x: torch.Tensor) -> Iterator[Case]:
    to_fp8 = {"tensor.to": lambda: x.to(torch.float8_e4m3fn)}
    yield _case("cast bf16 -> e4m3", "cast_", x, 3.0, lambda t: cast(t, "e4m3"), rivals=to_fp8)
    yield _case("cast bf16 -> e2m1", "cast_", x, 2.5, lambda t: cast(t, "e2m1"), fp4=True)
    yield _case("cast bf16 -> e2m1 SR", "cast_", x, 2.5, lambda t: cast(t, "e2m1", **NOISE))
    wide = x[: len(x) // 2].float()
    yield _case("cast fp32 -> bf16 SR", "cast_", wide, 6.0, lambda t: cast(t, "bf16", **NOISE))


def _fp8_cases(x: torch.Tensor) -> Iterator[Case]:
    for scaling, moved in (("tensor", 5.0), ("row", 3.0), ("1x128", 3 + 1 / 32), ("128x128", 3.0)):
        yield _case(
            f"quantize_fp8 {scaling}",
            "quantize_fp8_",
            x,
            moved,
            partial(quantize_fp8, scaling=scaling),
            rivals={"eager": lambda: _eager_row(x)} if scaling == "row" else {},
        )
    scale = torch.ones((), device=x.device)
    yield _case(
        "quantize_fp8 delayed",
        "quantize_fp8_",
        x,
        3.0,
        lambda t: quantize_fp8(t, scale=scale.to(t.device)),
    )
    made = quantize_fp8(x, scaling="1x128")
    yield _back_case(
        "dequantize_fp8 1x128",
        "dequantize_fp8_",
        made,
        3 + 1 / 32,
        lambda *parts: dequantize_fp8(*parts, scaling="1x128", dtype=torch.bfloat16),
    )


def _eager_row(x: torch.Tensor) -> torch.Tensor:
    """What one writes without a kernel: three passes, and a temporary in FP32."""
    scale = 448.0 / x.abs().amax(1, keepdim=True).float()
    return (x.float() * scale).to(torch.float8_e4m3fn)


def _mx_cases(x: torch.Tensor) -> Iterator[Case]:
    for element, data_bytes in (("e4m3", 1.0), ("e2m1", 0.5)):
        fp4 = element == "e2m1"
        moved = 2 + data_bytes + 1 / 32
        yield _case(
            f"quantize_mx {element}",
            "quantize_mx_",
            x,
            moved,
            partial(quantize_mx, element=element),
            rivals=_torchao_mx(x, element),
            fp4=fp4,
        )
        made = quantize_mx(x, element=element)
        yield _back_case(
            f"dequantize_mx {element}",
            "dequantize_mx_",
            made,
            moved,
            partial(dequantize_mx, element=element, dtype=torch.bfloat16),
        )
    yield _case(
        "quantize_mx e2m1 SR",
        "quantize_mx_",
        x,
        2.5 + 1 / 32,
        lambda t: quantize_mx(t, element="e2m1", **NOISE),
    )


def _torchao_mx(x: torch.Tensor, element: str) -> dict[str, Callable[[], object]]:
    """torchao's cast, where it is installed: bare machines do without."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return {}
    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float4_e2m1fn_x2
    return {"torchao to_mx": lambda: to_mx(x, dtype, 32)}


def _nvfp4_cases(x: torch.Tensor) -> Iterator[Case]:
    yield _case("amax_nvfp4", "amax_nvfp4_", x, 2.0, lambda t: (amax_nvfp4(t),))
    moved = 2.5 + 1 / 16
    amax = torch.tensor(AMAX, device=x.device)
    for name, options in (("", {}), (" hadamard", {"hadamard": True}), (" SR", NOISE)):
        yield _case(
            f"quantize_nvfp4{name}",
            "quantize_nvfp4_",
            x,
            moved,
            partial(_quantize_nvfp4, amax, **options),
        )
    data, scales, _ = quantize_nvfp4(x, global_amax=amax)
    yield _back_case(
        "dequantize_nvfp4",
        "dequantize_nvfp4_",
        (data, scales),
        moved,
        lambda data, scales: dequantize_nvfp4(
            data, scales, amax.to(data.device), dtype=torch.bfloat16
        ),
    )
    yield _case("hadamard16", "hadamard16_", x, 4.0, hadamard16)


def _quantize_nvfp4(amax: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
    return quantize_nvfp4(x, global_amax=amax.to(x.device), **options)


def _case(
    name: str,
    op: str,
    x: torch.Tensor,
    moved: float,
    run: Function,
    *,
    rivals: Mapping[str, Callable[[], object]] | None = None,
    fp4: bool = False,
) -> Case:
    few = x[:CHECKED_ROWS]
    return Case(
        name=name,
        num_bytes=int(x.numel() * moved),
        candidates={OURS: lambda: run(x), **(rivals or {})},
        agrees=lambda: same(_tuple(run(few)), _tuple(run(few.cpu()))),
        target=registry.target_share(op, fp4=fp4, stochastic=name.endswith(" SR")),
    )


def _back_case(
    name: str,
    op: str,
    parts: tuple[torch.Tensor, ...],
    moved: float,
    run: Callable[..., torch.Tensor],
) -> Case:
    """`moved`: bytes an element of the result."""
    few = [part[:CHECKED_ROWS] for part in parts]
    numel = len(parts[0]) * ROW_NUMEL
    return Case(
        name=name,
        num_bytes=int(numel * moved),
        candidates={OURS: lambda: run(*parts)},
        agrees=lambda: same((run(*few),), (run(*(part.cpu() for part in few)),)),
        target=registry.target_share(op),
    )


def _tuple(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)
