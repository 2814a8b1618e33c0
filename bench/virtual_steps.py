"""A training in virtual time, on ranks that are not there. What runs is the runtime itself, on
tensors of few elements that stand for large ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..sharding.fully_shard import fully_shard
from .virtual_ranks import Along, Lanes, lanes_in_order, virtual_ranks
from .virtual_time import Link, Recorder, Transfer, Work, Works, schedule

STEPS = 2  # in the first one the order of use is not known yet
# So that what is no unit of its own is one as large modules outside the units are by default.
_SPLIT_ROOT_MIB = 1e-6


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One vector of `numel` elements, and the compute of whoever uses it. `is_unit`: as a block is;
    an embedding or a head is not, and stays gathered from forward to backward.
    """

    numel: int
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    is_unit: bool = True


@dataclass(frozen=True)
class Recording:
    """The works of a training; of each step the works that end it, and how many there are then."""

    works: Sequence[Work]
    ends: Sequence[tuple[Works, int]]

    def step_ms(self, gb_per_s: Mapping[Link, float]) -> float:
        """The last step, from the end of the optimizer's step before it to that of its own."""
        ends_ms = schedule(self.works, gb_per_s)
        before, end = (max(ends_ms[work] for work in works) for works, _ in self.ends[-2:])
        return end - before

    def step_bytes(self) -> Counter[Link]:
        """What the last step moves over each link."""
        (_, first), (_, last) = self.ends[-2:]
        moved: Counter[Link] = Counter()
        for work in self.works[first:last]:
            moved.update(work.loads)
        return moved


def record(
    layers: Sequence[Layer],
    sizes: Sequence[int],
    machine: Recorder,
    transfers: Callable[[nn.Module, Along], Transfer],
    lanes: Lanes = lanes_in_order,
    **options: Any,
) -> Recording:
    """Train `layers`, one after the other, on `machine` along axes of `sizes`.

    transfers: what collectives of the groups take that the sharded model has. options: those of
    `fully_shard`.
    """
    with virtual_ranks(machine, lanes, sizes) as along:
        kinds = {True: _Unit, False: _Part}
        model = nn.Sequential(*(kinds[layer.is_unit](layer, machine) for layer in layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        fully_shard(
            model,
            optimizer,
            fsdp_unit_modules=[_Unit],
            split_root_mib=_SPLIT_ROOT_MIB,
            **options,
        )
        machine.take = transfers(model, along)
        ends = []
        with machine:
            for _ in range(STEPS):
                model(torch.zeros(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ends.append((machine.now(), len(machine.works)))
        del model, optimizer
    return Recording(machine.works, ends)


class _Part(nn.Module):
    def __init__(self, layer: Layer, machine: Recorder) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layer.numel // 128, 128))
        self._layer, self._machine = layer, machine

    def forward(self, x: Tensor) -> Tensor:
        return _Compute.apply(x, self.weight, self._layer, self._machine)


class _Unit(_Part):
    """The class of units."""


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer, machine: Recorder) -> Tensor:
        machine.compute(layer.forward_ms)
        ctx.layer, ctx.machine = layer, machine
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.machine.compute(ctx.layer.backward_ms)
        (weight,) = ctx.saved_tensors
        return grad.clone(), torch.zeros_like(weight), None, None
