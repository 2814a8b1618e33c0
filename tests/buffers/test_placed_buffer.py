"""What ranks hold on a grid, and that the movements between placements bring it there: played
through for all ranks in one process.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from sidestream.buffers import (
    BufferPool,
    Grid,
    Hop,
    Movement,
    PlacedBuffer,
    Placement,
    Placements,
    flat_layout,
    redistribute,
    spans,
)
from sidestream.sharding.placements import OUTER, STRATEGIES, unit_placements

R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL
SIZES = [(1,), (4,), (2, 3), (3, 1), (1, 4), (2, 2, 2), (2, 1, 3)]
NUMEL = 24


def coordinates(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


def cuts(axes: int) -> list[Placements]:
    """Every placement whose part is one stretch."""
    return [(S,) * cut + (R,) * (axes - cut) for cut in range(axes + 1)]


def play(
    sizes: tuple[int, ...], held: dict[tuple[int, ...], Tensor], source: Placements, to: Placements
) -> dict[tuple[int, ...], Tensor]:
    """All ranks' whole buffers, NaN where they hold nothing, after the movements."""
    ways = {rank: redistribute(NUMEL, Grid(sizes, rank), source, to) for rank in held}
    for place in range(len(next(iter(ways.values())))):
        before = {rank: data.clone() for rank, data in held.items()}
        for rank, hops in ways.items():
            move(rank, hops[place], before, held[rank])
    return held


def move(
    rank: tuple[int, ...], hop: Hop, before: dict[tuple[int, ...], Tensor], data: Tensor
) -> None:
    peers = [(*rank[: hop.axis], peer, *rank[hop.axis + 1 :]) for peer in range(hop.parts)]
    start, stop = hop.own_span
    if hop.movement is Movement.SUM:
        total = torch.zeros(hop.part_numel)
        for peer in peers:
            total += before[peer][start:stop]
        data.fill_(float("nan"))
        data[start:stop] = total
        return
    for number, peer in enumerate(peers):
        first = hop.start + number * hop.part_numel
        data[first : first + hop.part_numel] = before[peer][first : first + hop.part_numel]


def only(rank: tuple[int, ...], sizes: tuple[int, ...], held: Placements, data: Tensor) -> Tensor:
    start, stop = Grid(sizes, rank).span(NUMEL, held)
    kept = torch.full((NUMEL,), float("nan"))
    kept[start:stop] = data[start:stop]
    return kept


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_parts_tile_the_buffer_in_the_order_of_slices(sizes: tuple[int, ...]) -> None:
    for held in cuts(len(sizes)):
        found = spans(NUMEL, sizes, coordinates(sizes), held)
        covered = sorted(set(found))
        assert covered[0][0] == 0 and covered[-1][1] == NUMEL
        assert all(first[1] == second[0] for first, second in itertools.pairwise(covered))
        shared = len(found) // len(covered)
        assert all(found.count(span) == shared for span in covered)
    finest = spans(NUMEL, sizes, coordinates(sizes), (S,) * len(sizes))
    assert list(finest) == sorted(finest), "ranks in the order of coordinates hold slices in order"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_gather_brings_what_more_ranks_hold(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(NUMEL, dtype=torch.float32)
    for source, to in itertools.combinations(reversed(cuts(len(sizes))), 2):
        held = {rank: only(rank, sizes, source, whole) for rank in coordinates(sizes)}
        for rank, data in play(sizes, held, source, to).items():
            start, stop = Grid(sizes, rank).span(NUMEL, to)
            assert torch.equal(data[start:stop], whole[start:stop]), (source, to, rank)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_reduction_leaves_the_sum_of_all_where_it_belongs(sizes: tuple[int, ...]) -> None:
    ranks = coordinates(sizes)
    summands = {rank: torch.arange(NUMEL) * (number + 1.0) for number, rank in enumerate(ranks)}
    total = torch.stack(list(summands.values())).sum(0)
    for to in cuts(len(sizes)):
        held = {rank: data.clone() for rank, data in summands.items()}
        for rank, data in play(sizes, held, (P,) * len(sizes), to).items():
            start, stop = Grid(sizes, rank).span(NUMEL, to)
            assert torch.equal(data[start:stop], total[start:stop]), (to, rank)


def test_sums_come_before_gathers_the_first_axis_first() -> None:
    hops = redistribute(NUMEL, Grid((2, 2), (1, 0)), (P, P), (R, R))
    assert [(hop.movement.value, hop.axis) for hop in hops] == [
        ("sum", 0),
        ("sum", 1),
        ("gather", 1),
        ("gather", 0),
    ]
    assert [(hop.start, hop.stop) for hop in hops] == [(0, 24), (12, 24), (12, 24), (0, 24)]


@pytest.mark.parametrize("outer", [None, *OUTER], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda row: row.name)
def test_every_strategy_holds_one_stretch(strategy, outer) -> None:
    for axes in (1, 2, 3):
        placements = unit_placements(strategy, None if outer is None else OUTER[outer], axes)
        if outer == "optim" and (strategy.level == 0 or axes == 1):
            continue  # refused where the optimizer is sharded over the outer axis alone
        sizes = (2,) * axes
        for held in (placements.params, placements.main, placements.whole):
            found = set(spans(NUMEL, sizes, coordinates(sizes), held))
            assert sum(stop - start for start, stop in found) == NUMEL, "each element is somewhere"


def test_what_is_no_stretch_is_refused() -> None:
    with pytest.raises(AssertionError, match="replicates comes before one that shards"):
        Grid((2, 2), (1, 0)).span(NUMEL, (R, S))


def test_memory_is_that_of_the_part() -> None:
    layout, pool = flat_layout([(40, 30)], 6), BufferPool(torch.device("cpu"))
    buffer = PlacedBuffer(pool, layout, Grid((2, 3), (1, 1)), (S, R), torch.bfloat16)
    assert buffer.span == (layout.numel // 2, layout.numel)
    buffer.hold(pool.lease(buffer.numel, buffer.dtype))
    assert pool.live_bytes == buffer.nbytes == layout.numel // 2 * 2
    own = buffer.part((buffer.start + 128, buffer.start + 256))
    buffer.shrink()
    assert buffer.is_shrunk and not pool.live_bytes
    buffer.grow()
    buffer.memory.fill_(3)
    assert own.tolist() == [3.0] * 128 and pool.live_bytes == buffer.nbytes
    with pytest.raises(AssertionError, match="another rank"):
        buffer.part((0, 128))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_whole_tensor_is_written_where_its_elements_lie(sizes: tuple[int, ...]) -> None:
    shapes = [(7, 60), (3,), (0, 2), ()]
    layout, pool = flat_layout(shapes, math.prod(sizes)), BufferPool(torch.device("cpu"))
    values = [
        torch.randn(shape[::-1]).movedim(0, -1) if shape else torch.tensor(7.0) for shape in shapes
    ]
    for held in cuts(len(sizes)):
        whole = torch.full((layout.numel,), float("nan"))
        for place in coordinates(sizes):
            buffer = PlacedBuffer(pool, layout, Grid(sizes, place), held, torch.float32)
            buffer.hold(torch.full((buffer.numel,), float("nan")))
            version = buffer.memory._version
            for index, value in enumerate(values):
                buffer.write(index, value)
            assert buffer.memory._version == version
            whole[buffer.start : buffer.stop] = buffer.memory
        for segment, value in zip(layout.segments, values, strict=True):
            assert torch.equal(whole[segment.start : segment.stop].view(segment.shape), value)
        assert whole.isnan().sum() == layout.padding_numel, "more than the tensors was written"
