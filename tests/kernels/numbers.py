"""Public calls with a number that may be a tensor on the device: a seed, or a scale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sidestream import kernels as k

SEED, SCALE = -(2**40) - 77, 0.3
DTYPES = {"seed": torch.int64, "scale": torch.float32}
VALUES = {"seed": SEED, "scale": SCALE}
FORMAT = "mxfp8"
NUMEL = 4096 + 128


@dataclass(frozen=True)
class Call:
    """kind: which number it takes. run: makes what the call writes, on `x`'s device."""

    op: str
    kind: str
    run: Callable[..., list[torch.Tensor]]

    def number(self, value: Any = None, device: str = "cpu") -> torch.Tensor:
        """The number, by default `VALUES`', as a tensor."""
        value = VALUES[self.kind] if value is None else value
        return torch.tensor(value, dtype=DTYPES[self.kind], device=device)


def source(device: str = "cpu") -> torch.Tensor:
    """What all calls read: [2, NUMEL]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, NUMEL, generator=generator).to(device)


def _noise(seed: Any) -> dict[str, Any]:
    return {"rounding": "stochastic", "seed": seed}


def _cast(x, seed, first_index=5):
    return [k.cast(x, to, first_index=first_index, **_noise(seed)) for to in ("e4m3", "e2m1")]


def _quantize_mx(x, seed, first_index=32):
    return [*k.quantize_mx(x, first_index=first_index, **_noise(seed))]


def _quantize_nvfp4(x, seed, first_index=5):
    return [*k.quantize_nvfp4(x, first_index=first_index, **_noise(seed))]


def _both(quantize, x, seed, first_index):
    matrix = x.view(-1)[:8192].view(128, 64)
    made = quantize(matrix, first_index=first_index, **_noise(seed))
    return [one for side in made for one in side]


def _both_mx(x, seed, first_index=32):
    return _both(k.quantize_mx_with_transpose, x, seed, first_index)


def _both_nvfp4(x, seed, first_index=5):
    return _both(k.quantize_nvfp4_with_transpose, x, seed, first_index)


def _grouped(quantize, x, seed, first_index):
    matrix = x.view(-1)[:8192].view(128, 64)
    ends = torch.arange(40, 129, 88, device=x.device)  # of a list, no capture may make a tensor
    return [*quantize(matrix, ends, first_index=first_index, **_noise(seed))]


def _grouped_mx(x, seed, first_index=32):
    return _grouped(k.quantize_mx_grouped, x, seed, first_index)


def _grouped_nvfp4(x, seed, first_index=5):
    return _grouped(k.quantize_nvfp4_grouped, x, seed, first_index)


def _message(x, **options):
    numel = k.message_layout(FORMAT, [x.numel()]).num_bytes
    message = torch.zeros(numel, dtype=torch.uint8, device=x.device)
    k.pack_message_(message, [x], FORMAT, **options)
    return message


def _pack_message(x, seed, first_index=16):
    return [_message(x, first_indices=[first_index], **_noise(seed))]


def _pack(x, scale):
    flat = torch.ones(x.numel() + 3, device=x.device)
    k.pack_(flat, [x], [3], scale=scale, accumulate=True)
    return [flat]


def _unpack(x, scale):
    made = torch.zeros(2, NUMEL // 2, device=x.device)
    k.unpack_([made], x.view(-1), [7], scale=scale)
    return [made]


def _reduce(x, scale):
    out = torch.zeros(NUMEL, device=x.device)
    k.reduce_(out, x, scale=scale)
    return [out]


def _unpack_message(x, scale):
    made = torch.ones_like(x)
    k.unpack_message_([made], _message(x), FORMAT, scale=scale, accumulate=True)
    return [made]


def _reduce_messages(x, scale):
    out = torch.zeros(x.numel(), device=x.device)
    k.reduce_messages_(out, _message(x).unsqueeze(0), FORMAT, scale=scale)
    return [out]


def _reduce_peer_messages(x, scale):
    out = torch.zeros(x.numel(), device=x.device)
    k.reduce_peer_messages_(out, [_message(x)], FORMAT, scale=scale)
    return [out]


CALLS = [
    Call("cast_", "seed", _cast),
    Call("quantize_mx_", "seed", _quantize_mx),
    Call("quantize_nvfp4_", "seed", _quantize_nvfp4),
    Call("quantize_mx_with_transpose_", "seed", _both_mx),
    Call("quantize_nvfp4_with_transpose_", "seed", _both_nvfp4),
    Call("quantize_mx_grouped_", "seed", _grouped_mx),
    Call("quantize_nvfp4_grouped_", "seed", _grouped_nvfp4),
    Call("pack_message_", "seed", _pack_message),
    Call("pack_message_", "scale", lambda x, scale: [_message(x, scale=scale)]),
    Call("pack_", "scale", _pack),
    Call("unpack_", "scale", _unpack),
    Call("reduce_", "scale", _reduce),
    Call("unpack_message_", "scale", _unpack_message),
    Call("reduce_messages_", "scale", _reduce_messages),
    Call("reduce_peer_messages_", "scale", _reduce_peer_messages),
]
IDS = [f"{call.op}-{call.kind}" for call in CALLS]


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All bytes of each."""
    return [tensor.cpu().reshape(-1).view(torch.uint8) for tensor in tensors]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether all bytes are equal."""
    return all(map(torch.equal, bits(found), bits(expected)))
