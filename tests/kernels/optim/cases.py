"""The shards that the flat optimizers are tried on, their formula again in NumPy, and ulps."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sidestream.kernels.optim import op
from sidestream.tests.kernels import oracle

CANARIES = 32  # elements on each side of every shard that must stay as they are
STATE_NAMES = ("param", "first", "second", "compute")


@dataclass
class Shards:
    """What one step reads and writes: `first` is a moment or momentum, `second` the other moment.

    Each is a view `start` elements into memory of its own, canaries around it.
    """

    param: torch.Tensor
    grad: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    compute: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def outcome(self) -> dict[str, torch.Tensor]:
        """All memory that a step may have touched, canaries included."""
        found = dict(self.memory)
        if self.amax is not None:
            found["amax"] = self.amax
        return found

    def again(self) -> "Shards":
        """The same values in other memory."""
        memory = {name: whole.clone() for name, whole in self.memory.items()}
        start = self.param.storage_offset()
        views = {name: whole[start : start + len(self.param)] for name, whole in memory.items()}
        amax = None if self.amax is None else self.amax.clone()
        return replace(self, **views, amax=amax, memory=memory)


def make_shards(numel, grad_dtype=torch.float32, compute_dtype=None, *, seed=0, late=0) -> Shards:
    """Parameters around 1, gradients over many magnitudes, moments of a run some steps old.

    `late`: elements by which all memory misses 16 bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 6, (numel,), generator=generator).float())
    normal = [torch.randn(numel, generator=generator) for _ in range(4)]
    values = {
        "param": normal[0],
        "grad": (normal[1] * spread).to(grad_dtype),
        "first": normal[2] * spread,
        "second": (normal[3] * spread).square(),
    }
    if compute_dtype is not None:
        values["compute"] = torch.zeros(numel, dtype=compute_dtype)
    start, memory = CANARIES + late, {}
    for name, value in values.items():
        whole = torch.full((start + numel + CANARIES,), 1.5).to(value.dtype)
        whole[start : start + numel] = value
        memory[name] = whole
    views = {name: whole[start : start + numel] for name, whole in memory.items()}
    is_codes = compute_dtype is torch.uint8
    return Shards(**views, amax=torch.zeros(()) if is_codes else None, memory=memory)


def with_special_values(shards: Shards) -> Shards:
    """NaN, infinities, zeros of both signs and subnormals in every shard, each elsewhere."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38])
    for index, name in enumerate(("param", "grad", "first", "second")):
        shard = getattr(shards, name)
        place = slice(11 * index, 11 * index + len(special))
        shard[place] = special.abs() if name == "second" else special
    return shards


def make_segments(numel: int, dtype=torch.float32) -> op.Segments:
    """Five segments: one empty, one of three elements that leaves the next one unaligned."""
    starts = [0, numel // 2, numel // 2, numel // 2 + 3, numel - 16]
    lr_scales = torch.tensor([1.0, 5.0, 0.1, 0.0, 3.0], dtype=dtype)
    weight_decays = torch.tensor([0.1, 7.0, 0.0, 0.3, 0.01], dtype=dtype)
    return op.Segments(starts, lr_scales, weight_decays)


def naive_coefficients(numel, lr, weight_decay, segments):
    """(learning rate, weight decay) of every element, FP64."""
    if segments is None:
        return np.full(numel, lr), np.full(numel, weight_decay)
    lengths = np.diff([*segments.starts, numel])
    scales, decays = (x.double().numpy() for x in (segments.lr_scales, segments.weight_decays))
    return np.repeat(lr * scales, lengths), np.repeat(decays, lengths)


def naive_gradient(shards, factor, maximize):
    g = shards.grad.float().numpy()
    if factor is not None:
        g = g * np.float32(factor)
    return -g if maximize else g


def naive_adamw(shards, lr, step, betas, eps, weight_decay, maximize, segments=None, factor=None):
    """(param, exp_avg, exp_avg_sq) after a step, elementwise in FP32."""
    with np.errstate(all="ignore"):
        f32 = np.float32
        rate, decay = naive_coefficients(len(shards.param), lr, weight_decay, segments)
        p, m, v = (x.numpy() for x in (shards.param, shards.first, shards.second))
        g = naive_gradient(shards, factor, maximize)
        p = p * (1 - rate * decay).astype(f32)
        weight = f32(1 - betas[0])
        m = m + weight * (g - m) if weight < 0.5 else g - (g - m) * (f32(1) - weight)
        v = v * f32(betas[1]) + (f32(1 - betas[1]) * g) * g
        denominator = np.sqrt(v) / f32((1 - betas[1] ** step) ** 0.5) + f32(eps)
        p = p + ((-rate / (1 - betas[0] ** step)).astype(f32) * m) / denominator
    return [torch.from_numpy(x) for x in (p, m, v)]


def ulps(actual: torch.Tensor, expected: torch.Tensor, *scale: torch.Tensor) -> float:
    """The largest difference in units of the last place of the largest magnitude in `scale`."""
    largest = torch.stack([x.abs().double() for x in (expected, *scale)]).amax(0)
    exponent = torch.frexp(largest.clamp_min(2.0**-126)).exponent - 24
    difference = (actual.double() - expected.double()).abs()
    return float((difference / torch.exp2(exponent.double())).amax())


def assert_same_outcome(actual: Shards, expected: Shards) -> None:
    """Bit for bit in all memory, canaries included."""
    wanted = expected.outcome()
    for name, found in actual.outcome().items():
        if found.dtype is torch.uint8:
            assert torch.equal(found, wanted[name]), name
        else:
            oracle.assert_same_bits(found, wanted[name])
