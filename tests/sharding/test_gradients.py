"""How long gradients live, and that sums under `no_sync` lose none of them."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.buffers import BufferPool, PlacedBuffer, Placement, flat_layout
from sidestream.sharding.collectives import Collectives
from sidestream.sharding.exchange import Reduction
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.lanes import DeferredLane, Lane, SerialLane
from sidestream.sharding.optimizer_view import OptimizerView
from sidestream.sharding.placements import UnitPlacements
from sidestream.sharding.precision import UnitDtypes
from sidestream.sharding.unit_spec import UnitSpec
from sidestream.sharding.wire import PlainWire
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.axes import one_axis

SHAPES = [(5, 3), (127,)]
FP32 = UnitDtypes(*[torch.float32] * 4)
ALL = (Placement.REPLICATE,)


def reduction_on(device: torch.device) -> tuple[Reduction, list[nn.Parameter]]:
    """A unit of one rank, and its parameters with their gradients."""
    params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    layout, pool, wire = flat_layout(SHAPES, 1), BufferPool(device), PlainWire(torch.float32)
    placements = UnitPlacements(ALL, ALL)
    names = ("matrix", "vector")
    spec = UnitSpec(
        index=0,
        name="unit",
        names=names,
        layout=layout,
        first_indices=(0, 15),
        dtypes=FP32,
        placements=placements,
        wires=(wire, wire),
        param_wire=None,
        scale=1.0,
    )
    alone = Collectives(one_axis(0, 1, device))
    grad = PlacedBuffer(pool, layout, alone.grid, ALL, torch.float32)
    reduction = Reduction(spec, OptimizerView("unit", grad, pool), alone, pool)
    reduction.attach(params)
    return reduction, params


@pytest.mark.parametrize("lane", [DeferredLane(), SerialLane()], ids=["deferred", "serial"])
@pytest.mark.parametrize("sync", [True, False], ids=["exchange", "accumulate"])
def test_gradients_live_until_whoever_packs_them_has_ended(lane: Lane, sync: bool) -> None:
    # No CPU: as on a GPU, the pack may not have run when it has been called.
    reduction, params = reduction_on(torch.device("meta"))
    references = [weakref.ref(param.grad) for param in params]
    exchange = reduction.start(lane, sync=sync, number=0)
    assert all(param.grad is None for param in params)
    assert all(reference() is not None for reference in references), "freed before the pack ended"
    exchange.finish()
    gc.collect()
    assert all(reference() is None for reference in references), "kept after the pack"


def test_a_cpu_frees_gradients_as_soon_as_they_are_packed() -> None:
    reduction, params = reduction_on(torch.device("cpu"))
    references = [weakref.ref(param.grad) for param in params]
    exchange = reduction.start(DeferredLane(), sync=True, number=0)
    assert all(reference() is None for reference in references)
    exchange.finish()


def counts(rank: int, step: int) -> Tensor:
    """Whole numbers small enough that every sum of them is exact."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-64, 64, (2, 5), generator=generator).float()


def sums_are_exact(rank: int, world_size: int) -> None:
    for zero in range(4):
        model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Identity())
        ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
        total = torch.zeros(3, 5)
        for step, sync in enumerate((False, False, False, True, False, False, True)):
            everyone = [counts(other, step).sum(0) for other in range(world_size)]
            total += torch.stack(everyone).sum(0)
            with contextlib.nullcontext() if sync else ss.no_sync(model):
                # The gradient of each row of the weight is the sum of the inputs.
                (model(counts(rank, step)).sum() * world_size).backward()
            if sync:
                assert torch.equal(model[0].weight.grad.full_tensor(), total), (zero, step)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_loses_no_microbatch(world_size: int) -> None:
    run_on_ranks(sums_are_exact, world_size)


def exchanges_inside_and_outside(rank: int, world_size: int) -> list[int]:
    model = nn.Linear(5, 3)
    ss.fully_shard(model, zero_dp_strategy=2)
    calls, counted = runtime_of(model).collectives.traffic.calls, []

    def backward() -> None:
        model(counts(rank, 0)).sum().backward()
        counted.append(calls["exchange"])

    with ss.no_sync(model):
        with ss.no_sync(model):
            backward()
        backward()
    backward()
    return counted


def test_no_sync_inside_no_sync_ends_with_the_outer_one() -> None:
    assert run_on_ranks(exchanges_inside_and_outside, 2) == [[0, 0, 1]] * 2
