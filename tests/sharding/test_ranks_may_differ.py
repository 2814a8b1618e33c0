"""With `ranks_may_differ`, ranks that use different units, in other orders or more often, get what
a plain model gets, at every ZeRO level.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.divergent_models import (
    ROUTES,
    WIDTH,
    Block,
    RoutedTwins,
    alike,
    experts,
    one_rank_drops,
    other_order,
)
from sidestream.tests.sharding.meshes import WORLD, options_of
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss


def all_routes(rank: int, world_size: int, checkpoints: bool | None) -> None:
    levels = LEVELS[world_size] if checkpoints is None else (3,)
    for routes in ROUTES.values():
        for zero in levels:
            twins = RoutedTwins(
                rank, world_size, zero, checkpoints=checkpoints, ranks_may_differ=True
            )
            twins.train_on(routes)


@pytest.mark.parametrize(
    ("world_size", "checkpoints"),
    [
        pytest.param(2, None, id="2 ranks"),
        pytest.param(3, None, id="3 ranks"),
        pytest.param(3, False, id="checkpoints"),
        pytest.param(2, True, id="reentrant checkpoints"),
    ],
)
def test_every_way_to_differ_equals_a_plain_model(
    world_size: int, checkpoints: bool | None
) -> None:
    run_on_ranks(all_routes, world_size, checkpoints)


def options(rank: int, world_size: int) -> None:
    for prefetch in range(3):
        for overlap in (False, True):
            twins = RoutedTwins(
                rank,
                world_size,
                3,
                prefetch=prefetch,
                overlap_param_gather=overlap,
                overlap_grad_reduce=overlap,
                ranks_may_differ=True,
            )
            twins.train_on(other_order, steps=2)
    for reshard in (True, False):
        twins = RoutedTwins(
            rank, world_size, 3, reshard_after_forward=reshard, ranks_may_differ=True
        )
        twins.train_on(experts)
    policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    twins = RoutedTwins(
        rank, world_size, 3, mixed_precision_policy=policy, bucket_mib=2e-4, ranks_may_differ=True
    )
    twins.pass_both(0, experts)
    twins.check_grads(rtol=0.1, atol=0.02)  # BF16 has 8 bits


def test_with_every_option() -> None:
    run_on_ranks(options, 2)


def accumulates(rank: int, world_size: int, zero: int) -> None:
    twins = RoutedTwins(rank, world_size, zero, ranks_may_differ=True)
    for step, routes in enumerate((experts, other_order, one_rank_drops)):
        twins.pass_both(10 + step, routes, sync=False)
        twins.pass_both(20 + step, experts, sync=False)
        twins.pass_both(30 + step, routes)
        twins.check_grads()
        twins.step()
    twins.check_params()


@pytest.mark.parametrize("zero", range(4))
def test_under_no_sync(zero: int) -> None:
    run_on_ranks(accumulates, 2, zero)


def validates(rank: int, world_size: int) -> None:
    twins = RoutedTwins(rank, world_size, 3, ranks_may_differ=True)
    for routes in ROUTES.values():
        with torch.no_grad():
            for step in range(2):
                x = twins.data(step, 4, WIDTH)[rank]
                got = twins.output(twins.sharded, x, routes(rank, step))
                expected = twins.output(twins.plain, x, routes(rank, step))
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
                twins.check_at_rest()
        twins.pass_both(3, routes)
        twins.check_grads()
        twins.step()


@pytest.mark.parametrize("world_size", [2, 3], ids=["2 ranks", "3 ranks"])
def test_forwards_without_gradients(world_size: int) -> None:
    run_on_ranks(validates, world_size)


class ChecksTwice(nn.Module):
    """On rank 0 alone units run in two reentrant checkpoints: gradients come after the exchange."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.units = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        uses = [*self.units, *self.units] if self.rank == 0 else self.units
        for unit in uses:
            x = checkpoint(unit, x, use_reentrant=True)
        return x


def late_gradients(rank: int, world_size: int, zero: int) -> None:
    torch.manual_seed(0)
    twins = Twins(rank, world_size, ChecksTwice(rank), zero, [Block], ranks_may_differ=True)
    for step in range(2):
        for other, value in enumerate(twins.data(step, 4, WIDTH)):
            twins.plain.rank = other
            (square_loss(twins.plain, value) / world_size).backward()
        square_loss(twins.sharded, twins.data(step, 4, WIDTH)[rank]).backward()
        twins.check_grads()
        twins.step()
    twins.check_params()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_gradients_that_come_late_on_one_rank(zero: int) -> None:
    run_on_ranks(late_gradients, 2, zero)


def same_bits(rank: int, world_size: int) -> None:
    found = []
    for may_differ in (False, True):
        twins = RoutedTwins(rank, world_size, 3, ranks_may_differ=may_differ)
        traffic = twins.runtime.collectives.traffic
        twins.train_on(alike, steps=1)
        traffic.reset()
        twins.train_on(alike, steps=2)
        counts = dict(traffic.calls), dict(traffic.sent_bytes)
        values = [param.full_tensor() for param in twins.sharded.parameters()]
        found.append((counts, values))
    (counts, values), (more_counts, more_values) = found
    assert counts == more_counts, "ranks that agree gather and exchange no more"
    assert all(torch.equal(one, two) for one, two in zip(values, more_values, strict=True))


def test_ranks_that_agree_get_the_same_bits_by_the_same_gathers() -> None:
    run_on_ranks(same_bits, 2)


def validates_alone(rank: int, world_size: int) -> str:
    twins = RoutedTwins(rank, world_size, 3, ranks_may_differ=True)
    twins.train_on(experts, steps=1)
    with pytest.raises(RuntimeError, match="equally often") as raised:
        if rank == 0:
            with torch.no_grad():
                twins.output(twins.sharded, torch.ones(2, WIDTH), (0, 1))
        twins.train_on(experts, steps=2)
    return str(raised.value)


def test_one_rank_that_validates_alone_is_told() -> None:
    for text in run_on_ranks(validates_alone, 2):
        assert "rank 0 in a forward" in text and "rank 1 in a backward" in text


def fails_alone(rank: int, world_size: int) -> bool:
    twins = RoutedTwins(rank, world_size, 3, ranks_may_differ=True)
    twins.train_on(experts, steps=1)
    route = (0, 1, 99) if rank == 0 else (0, 2, 4)  # there is no unit 99
    failed = False
    with pytest.raises(RuntimeError, match="equally often"):
        try:
            twins.output(twins.sharded, torch.ones(2, WIDTH), route).sum().backward()
        except IndexError:
            failed = True
            twins.output(twins.sharded, torch.ones(2, WIDTH), (0, 1))
    return failed


def test_an_exception_on_one_rank_is_told_at_the_next_use() -> None:
    assert run_on_ranks(fails_alone, 2) == [True, False]


def fails_alike(rank: int, world_size: int) -> None:
    twins = RoutedTwins(rank, world_size, 3, ranks_may_differ=True)
    for _ in range(2):
        with pytest.raises(IndexError):
            twins.output(twins.sharded, torch.ones(2, WIDTH), (0, 1 + rank, 99))
    twins.train_on(experts)


def test_an_exception_on_all_ranks_is_survived() -> None:
    run_on_ranks(fails_alike, 2)


def meshes(rank: int, world_size: int, mesh: str) -> None:
    options = options_of(mesh)
    for routes in (experts, other_order, one_rank_drops):
        twins = RoutedTwins(rank, world_size, 3, ranks_may_differ=True, **options)
        twins.train_on(routes, steps=2)


@pytest.mark.parametrize("mesh", ["HSDP", "HFSDP"])
def test_on_two_axes(mesh: str) -> None:
    run_on_ranks(meshes, WORLD, mesh)
