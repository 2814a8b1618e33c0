"""Packing: every element of the buffer is written, small gaps and large ones as zeros."""

import pytest
import torch
from torch import nn

from sidestream.buffers import BufferPool, flat_layout
from sidestream.sharding.wire import LARGE_GAP_NUMEL, GradientPacker

CPU = torch.device("cpu")
SHAPES = [(5, 3), (130,), (7,)]
GAPS_OF_ONE = [(1, 127), (127,)]


@pytest.mark.parametrize("world_size", [1, 4, 10, 11, 64])
@pytest.mark.parametrize("absent", [None, 1], ids=["all", "one absent"])
@pytest.mark.parametrize("shapes", [SHAPES, GAPS_OF_ONE], ids=["any gaps", "gaps of one"])
def test_whatever_no_gradient_covers_is_zero(
    world_size: int, absent: int | None, shapes: list[tuple[int, ...]]
) -> None:
    layout = flat_layout(shapes, world_size)
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    expected = torch.zeros(layout.numel)
    for index, param in enumerate(params):
        if index != absent:
            param.grad = torch.randn_like(param)
            segment = layout.segments[index]
            expected[segment.start : segment.start + param.numel()] = param.grad.flatten()
    packer = GradientPacker(layout, torch.float32, BufferPool(CPU))
    flat = torch.full((layout.numel,), float("nan"))
    packer.take(params).fill(flat)
    assert torch.equal(flat, expected)
    assert all(param.grad is None for param in params)


def test_worlds_above_are_on_both_sides_of_a_large_gap() -> None:
    gaps = [
        max(stop - start for start, stop in flat_layout(SHAPES, world).gaps()) for world in (4, 64)
    ]
    assert gaps[0] < LARGE_GAP_NUMEL <= gaps[1]


@pytest.mark.parametrize("world_size", [4, 64])
def test_accumulates_onto_what_is_there(world_size: int) -> None:
    layout = flat_layout(SHAPES, world_size)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    packer = GradientPacker(layout, torch.float32, BufferPool(CPU))
    flat = torch.zeros(layout.numel)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        packer.take(params).add_to(flat)
    assert flat.sum() == 2 * sum(param.numel() for param in params)
