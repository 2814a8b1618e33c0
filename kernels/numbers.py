"""Numbers of a call that its caller has, or its device: seeds of noise, and scales.

One on a device is a tensor of one element there. No host reads it: a kernel does, by
`device_numbers.number_of`, so that a captured CUDA graph follows it, and a compiled function is
made once for all that it may be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .aliasing import check_apart
from .checks import check_number, check_one

Scale = float | torch.Tensor
"""A number, or an FP32 tensor of one element."""


def tensor_of(number: float | torch.Tensor | None) -> torch.Tensor | None:
    """The number where it is a tensor: memory that nothing of the call may write."""
    return number if isinstance(number, torch.Tensor) else None


def checked_scale(
    scale: Scale, device: torch.device, **written: torch.Tensor | Sequence[torch.Tensor]
) -> Scale:
    """`scale`, if it is a number, or one on `device`, its memory apart from what is written."""
    if isinstance(scale, torch.Tensor):
        check_one("scale", scale, (torch.float32,), device)
        named: dict[str, torch.Tensor | None] = {}
        for name, given in written.items():
            if isinstance(given, torch.Tensor):
                named[name] = given
            else:
                named |= {f"{name}[{index}]": tensor for index, tensor in enumerate(given)}
        check_apart({"scale": scale}, named)
        return scale
    scale = check_number("scale", scale)
    if torch.compiler.is_compiling():
        # Only here: it loads sympy, which whoever does not compile should not wait for.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if not statically_known_true(scale == 1.0):
            # One graph for all: torch gives it numbers as tensors, where products are made of them.
            return (torch.ones((), dtype=torch.float64, device=device) * scale).float()
    return scale


def unless_one(scale: Scale) -> Scale | None:
    """The scale as kernels take it: `None` for a number that changes nothing."""
    return scale if isinstance(scale, torch.Tensor) or scale != 1.0 else None
