"""Without `ranks_may_differ`, ranks that use different units at ZeRO-3 are told which, on every
rank, within the step; ranks that agree send nothing for it.
"""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.sharding import use_watch
from sidestream.sharding.collectives import Channel
from sidestream.sharding.uses import (
    END_OF_FORWARD,
    RankUses,
    UseRecord,
    deadlock,
    first_difference,
    standing,
)
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.divergent_models import (
    ROUTES,
    WIDTH,
    RoutedTwins,
    alike,
)
from sidestream.tests.sharding.meshes import options_of
from sidestream.tests.sharding.warned import warned

PATIENCE_S = 0.3
SOON_S = 5.0  # of a limit of 48 s


def told(rank: int, world_size: int, routes: str, options: dict[str, Any]) -> str:
    """What this rank is told when it trains on `routes`."""
    use_watch.PATIENCE_S = PATIENCE_S
    twins = RoutedTwins(rank, world_size, 3, **options)
    start = time.monotonic()
    with pytest.raises(ss.DivergentUseError) as raised:
        twins.train_on(ROUTES[routes])
    assert time.monotonic() - start < SOON_S
    return str(raised.value)


TELLS = {
    "experts": "the gather of unit 'units.1' where rank 1 came to the gather of unit 'units.2'",
    "dropped_layer": "the gather of unit 'units.2' where rank 1 came to the gather of unit",
    "one_rank_drops": "came to the gather of unit",
    "used_twice": "came to the gather of unit",
    "other_order": "the gather of unit 'units.0' where rank 1 came to the gather of unit 'units.4'",
    "nothing_in_common": "came to the gather of unit 'units.2'",
    "nothing_on_one_rank": "where rank 1 came to the end of the forward",
    "no_gradient_on_one_rank": "waits for the gradient exchange of unit 'units.4', which rank 1",
}


@pytest.mark.parametrize("world_size", [2, 3], ids=["2 ranks", "3 ranks"])
@pytest.mark.parametrize("routes", TELLS)
def test_every_rank_is_told_unit_and_rank(routes: str, world_size: int) -> None:
    texts = run_on_ranks(told, world_size, routes, {"prefetch": 0})
    assert len(set(texts)) == 1, "all ranks are told the same"
    assert "rank 0" in texts[0] and "ranks_may_differ=True" in texts[0]
    if world_size == 2:
        assert TELLS[routes] in texts[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="prefetch 1"),
        pytest.param({"prefetch": 2}, id="prefetch 2"),
        pytest.param(
            {"overlap_param_gather": False, "overlap_grad_reduce": False}, id="no overlap"
        ),
        pytest.param({"reshard_after_forward": False}, id="gathered from forward to backward"),
    ],
)
def test_with_other_options(options: dict[str, Any]) -> None:
    for routes in ("experts", "no_gradient_on_one_rank"):
        if routes == "no_gradient_on_one_rank" and "reshard_after_forward" in options:
            continue  # nothing is gathered in backward, so exchanges alone wait: that is no error
        texts = run_on_ranks(told, 2, routes, options)
        assert len(set(texts)) == 1 and "rank 1" in texts[0]


def untagged_twins(rank: int, world_size: int, **options: Any) -> RoutedTwins:
    """As over a backend whose messages have no tags: units of equal shape are taken for others."""
    use_watch.PATIENCE_S = PATIENCE_S
    Channel.tags_messages = property(lambda self: False)  # type: ignore[assignment]
    make = Channel.__init__

    def without_tags(channel: Channel, *arguments: Any) -> None:
        make(channel, *arguments)
        channel._point_to_point = False
        channel.received_parts = channel.size

    Channel.__init__ = without_tags  # type: ignore[method-assign]
    return RoutedTwins(rank, world_size, 3, **options)


def untagged(rank: int, world_size: int, routes: str) -> str:
    twins = untagged_twins(rank, world_size)
    with pytest.raises(ss.DivergentUseError) as raised:
        twins.train_on(ROUTES[routes])
    for param in twins.sharded.parameters():
        assert param.grad is None, "no gradient of wrong weights is shown"
    return str(raised.value)


@pytest.mark.parametrize("routes", ["experts", "nothing_in_common", "one_rank_drops"])
def test_where_messages_have_no_tags(routes: str) -> None:
    texts = run_on_ranks(untagged, 2, routes)
    assert len(set(texts)) == 1 and "gather of unit 'units." in texts[0]


def untagged_validation(rank: int, world_size: int) -> str:
    twins = untagged_twins(rank, world_size, prefetch=0)
    twins.train_on(alike, steps=1)
    with torch.no_grad(), pytest.raises(ss.DivergentUseError) as raised:
        twins.output(twins.sharded, torch.ones(2, WIDTH), (0, 1 + rank, 4))
    return str(raised.value)


def test_validation_where_messages_have_no_tags() -> None:
    for text in run_on_ranks(untagged_validation, 2):
        assert "'units.1' where rank 1 came to the gather of unit 'units.2'" in text


def validates_alone(rank: int, world_size: int) -> str:
    use_watch.PATIENCE_S = PATIENCE_S
    twins = RoutedTwins(rank, world_size, 3)
    twins.train_on(alike, steps=2)
    with pytest.raises(ss.DivergentUseError) as raised:
        if rank == 0:
            with torch.no_grad():
                twins.output(twins.sharded, torch.ones(2, WIDTH), (0, 1, 2, 3, 4))
        twins.train_on(alike, steps=2)
    return str(raised.value)


def test_one_rank_that_validates_alone_between_steps() -> None:
    for text in run_on_ranks(validates_alone, 2):
        assert "rank 0" in text and "rank 1" in text


def waits_alone(rank: int, world_size: int) -> list[str]:
    use_watch.PATIENCE_S, use_watch.WARN_S = PATIENCE_S, 1.0
    twins = RoutedTwins(rank, world_size, 3)
    with warned() as texts:
        twins.train_on(alike, steps=1)
        if rank == 1:
            time.sleep(3)  # then it does the same after all: nothing is wrong
        with torch.no_grad():
            twins.output(twins.sharded, torch.ones(2, WIDTH), (0, 1))
        twins.train_on(alike, steps=1)
    return texts


def test_one_rank_that_waits_for_others_says_so_once_and_goes_on() -> None:
    waiting, late = run_on_ranks(waits_alone, 2)
    assert len(waiting) == 1 and late == []
    assert "rank 0 waits for the gather of unit" in waiting[0]
    assert "rank 1 waits for nothing of this model" in waiting[0]


def agrees(rank: int, world_size: int) -> list[str]:
    """What ranks that agree ask their store."""
    asked: list[str] = []
    twins = RoutedTwins(rank, world_size, 3)
    watch = twins.runtime._watch
    store, watch._store = watch._store, _Noting(asked)
    for step in range(20):
        twins.pass_both(step, alike)
        twins.step()
        time.sleep(0.05)
    assert not store.check(["asked"])
    return asked


class _Noting:
    """A store that notes whoever asks it."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        raise RuntimeError(name)


def test_ranks_that_agree_ask_nobody() -> None:
    assert run_on_ranks(agrees, 2) == [[], []]


def a_slow_rank(rank: int, world_size: int) -> None:
    use_watch.PATIENCE_S = 0.1
    twins = RoutedTwins(rank, world_size, 3)
    for step in range(4):
        if rank == step % world_size:
            time.sleep(0.6)
        twins.pass_both(step, alike)
        twins.check_grads()
        twins.step()
    twins.check_params()


def test_waits_for_a_slow_rank_are_no_error() -> None:
    run_on_ranks(a_slow_rank, 3)


def differs_below(rank: int, world_size: int, zero: int) -> None:
    for routes in ROUTES.values():
        RoutedTwins(rank, world_size, zero).train_on(routes, steps=2)


@pytest.mark.parametrize("zero", range(3))
def test_lower_levels_are_free_of_it(zero: int) -> None:
    run_on_ranks(differs_below, 2, zero)


def differs_below_on_two_axes(rank: int, world_size: int, mesh: str) -> None:
    for routes in ROUTES.values():
        RoutedTwins(rank, world_size, 1, **options_of(mesh)).train_on(routes, steps=2)


@pytest.mark.parametrize("mesh", ["HFSDP", "HFSDP, shards apart", "two nodes"])
def test_lower_levels_are_free_of_it_where_a_gather_goes_along_two_axes(mesh: str) -> None:
    run_on_ranks(differs_below_on_two_axes, 4, mesh)


def dies(rank: int, world_size: int) -> str:
    twins = RoutedTwins(rank, world_size, 3)
    twins.train_on(alike, steps=1)
    dist.barrier()
    if rank == 1:
        return ""
    with pytest.raises(ss.CommunicationError) as raised:
        twins.train_on(alike, steps=50)
    return str(raised.value)


def test_a_rank_that_left_is_told_as_before() -> None:
    assert "look for the first error" in run_on_ranks(dies, 2)[0]


def test_two_models_of_a_process_are_watched_apart() -> None:
    for text in run_on_ranks(second_model, 2):
        assert "'units.1' where rank 1" in text


def second_model(rank: int, world_size: int) -> str:
    use_watch.PATIENCE_S = PATIENCE_S
    first = RoutedTwins(rank, world_size, 3)
    first.train_on(alike, steps=1)
    return told(rank, world_size, "experts", {"prefetch": 0})


# ---- without ranks


def record(*names: str) -> UseRecord:
    made = UseRecord()
    for name in names:
        made.note(name)
    return made


def test_tags_tell_units_and_numbers_apart() -> None:
    names = [f"gather of unit 'layers.{place}'" for place in range(300)]
    for number in (0, 1, 7, 2**40):
        tags = set()
        for name in names:
            made = UseRecord()
            made.count = number
            tags.add(made.note(name))
        assert len(tags) == len(names)
        assert all(0 < tag < 2**31 for tag in tags)
    again = record("a", "a", "a")
    assert len({UseRecord().note("a"), again.note("a")}) == 2


def test_fingerprints_tell_orders_apart() -> None:
    prints = {record(*names).fingerprint for names in ("ab", "ba", "a", "aab", "abb")}
    assert len(prints) == 5
    assert record(*("ab" * 500)).fingerprint == record(*("ab" * 500)).fingerprint < 2**62


def test_an_end_is_noted_behind_uses_alone() -> None:
    made = UseRecord()
    made.note_end(END_OF_FORWARD)
    assert made.count == 0
    made.note("a")
    made.note_end(END_OF_FORWARD)
    made.note_end(END_OF_FORWARD)
    assert made.latest() == (0, ["a", END_OF_FORWARD])


def takes_turns(rank: int, world_size: int) -> str:
    """Runs one of two models of the same names first, on rank 1 the other one."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    models = [
        ss.fully_shard_model(nn.Sequential(nn.Linear(4, 4)), device_mesh=mesh, zero_dp_strategy=3)
        for _ in range(2)
    ]
    with pytest.raises(ss.CommunicationError) as raised:
        for model in models if rank == 0 else reversed(models):
            model(torch.ones(1, 4))
    return str(raised.value)


def test_models_of_the_same_names_are_told_apart() -> None:
    for rank, text in enumerate(run_on_ranks(takes_turns, 2)):
        other = 1 - rank
        stood = f"for rank {other}, which stood in gather of unit '(root)' of model {other}"
        assert stood in text, text


def test_the_last_uses_are_kept() -> None:
    made = record(*map(str, range(1000)))
    start, names = made.latest(3)
    assert (start, names) == (997, ["997", "998", "999"])
    assert made.number_of("998") == 998 and made.number_of("2") is None


def said(
    *gathers: str, start: int = 0, exchanges: int = 0, waits: tuple[str, int, str] | None = None
) -> RankUses:
    return RankUses((start, list(gathers)), (0, ["x"] * exchanges), 0, waits)


def test_the_first_difference_is_told() -> None:
    assert first_difference([said("a", "b"), said("a", "b", "c"), None]) is None
    text = first_difference([said("a", "b", "c"), said("a"), said("a", "d", "e")])
    assert text == "rank 0 came to the b where rank 2 came to the d"
    assert first_difference([said("b", "c", start=1), said("a", "b", "d")]) == (
        "rank 0 came to the c where rank 1 came to the d"
    )


def test_a_deadlock_needs_every_rank_to_wait_for_what_another_did_not_begin() -> None:
    exchange, gather = ("exchange", 0, "exchange of u"), ("gather", 1, "gather of v")
    first = said("u", exchanges=1, waits=exchange)
    assert deadlock([first, said("u", "v", waits=gather)]) == (
        "rank 0 waits for the exchange of u, which rank 1 did not begin; "
        "rank 1 waits for the gather of v, which rank 0 did not begin"
    )
    assert deadlock([first, said("u", "v")]) is None, "rank 1 goes on"
    assert deadlock([first, None]) is None
    begun = said("u", "v", exchanges=1, waits=gather)
    assert deadlock([first, begun]) is None, "both have begun the exchange, which may be long"


def test_where_ranks_stand() -> None:
    text = standing([said(waits=("gather", 0, "gather of u")), said(), None])
    assert text == (
        "rank 0 waits for the gather of u; rank 1 waits for nothing of this model; "
        "rank 2 says nothing: it computes, or has gone"
    )
