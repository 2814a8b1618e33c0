"""Delayed scaling: the first step, the history, several ranks at once, saved and loaded."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sidestream.sharding.fp8 import DelayedScaling, History, update_scales
from sidestream.tests.ranks import run_on_ranks


def step(state, *amaxes):
    """The scales that tensors with these amaxes get, and the state a step later."""
    found = state.scales_for(torch.tensor(amaxes))
    update_scales([state])
    return found.tolist()


def test_a_tensor_without_history_takes_its_present_amax():
    state = DelayedScaling(History(length=3), 2)
    assert step(state, 7.0, 0.0) == [64.0, 1.0]  # 448 / 7; nothing to measure
    assert step(state, 14.0, 3.5) == [64.0, 128.0]  # the history's; still none
    assert step(state, 1.0, 3584.0) == [32.0, 128.0]
    assert step(state, 1.0, 1.0) == [32.0, 0.125]


def test_a_history_is_forgotten_after_its_length():
    state = DelayedScaling(History(length=3), 1)
    for amax in (56.0, 7.0, 7.0):  # newest first: the step itself is one of the three
        step(state, amax)
    assert step(state, 7.0) == [8.0]
    assert step(state, 7.0) == [64.0]


@pytest.mark.parametrize(
    ("history", "element", "expected"),
    [
        (History(length=8, algorithm="most_recent"), "e4m3", 64.0),
        (History(length=8, algorithm="max"), "e4m3", 8.0),
        (History(length=8, algorithm="most_recent", margin=3), "e4m3", 8.0),
        (History(length=8, algorithm="most_recent"), "e5m2", 8192.0),
    ],
    ids=["most recent", "max", "margin", "e5m2"],
)
def test_rules(history, element, expected):
    state = DelayedScaling(history, 1, element=element)
    for amax in (56.0, 7.0):
        step(state, amax)
    assert step(state, 1.0) == [expected]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_shows_and_leaves_the_scale(bad):
    state = DelayedScaling(History(length=4, algorithm="most_recent"), 1)
    step(state, 7.0)
    assert math.isnan(step(state, bad)[0])
    assert step(state, 14.0) == [64.0]
    assert step(state, 1.0) == [32.0]


def test_microbatches_of_a_step_are_one():
    state = DelayedScaling(History(length=4), 1)
    state.scales_for(torch.tensor([14.0]))
    assert step(state, 7.0) == [32.0]
    assert step(state, 1.0) == [32.0]


def test_what_is_only_evaluated_is_not_noted():
    state = DelayedScaling(History(length=4), 1)
    assert state.eval().scales_for(torch.tensor([1.0])).tolist() == [448.0]
    assert not state.amax_history.any()
    assert step(state.train(), 7.0) == [64.0]
    assert state.eval().scales_for(torch.tensor([700.0])).tolist() == [64.0]
    assert step(state, 7.0) == [64.0]
    assert step(state, 7.0) == [64.0]


def test_refusals():
    with pytest.raises(TypeError, match="history: expected a History, got str"):
        DelayedScaling("delayed", 1)
    with pytest.raises(ValueError, match="num_tensors: expected 0 or more, got -1"):
        DelayedScaling(History(), -1)
    with pytest.raises(ValueError, match="element: expected one of e4m3, e5m2, got 'e2m1'"):
        DelayedScaling(History(), 1, element="e2m1")
    with pytest.raises(ValueError, match=r"amaxes: expected shape \(2,\), got \(1,\)"):
        DelayedScaling(History(), 2).scales_for(torch.ones(1))


def test_saved_loaded_and_moved():
    model = nn.Sequential(nn.Linear(2, 2), DelayedScaling(History(length=3), 2))
    step(model[1], 7.0, 1e-3)
    step(model[1], 5.0, 3.1415926)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    again = nn.Sequential(nn.Linear(2, 2), DelayedScaling(History(length=3), 2)).bfloat16()
    assert again[0].weight.dtype == torch.bfloat16
    again.load_state_dict(saved)
    again.half()
    assert again[1].amax_history.dtype == torch.float32
    assert step(again[1], 1.0, 1.0) == step(model[1], 1.0, 1.0)
    longer = nn.Sequential(nn.Linear(2, 2), DelayedScaling(History(length=4), 2))
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.amax_history"):
        longer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.scales"):
        longer.load_state_dict({name: saved[name] for name in saved if name != "1.scales"})
    meta = DelayedScaling(History(length=3), 2, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    assert step(meta, 7.0, 7.0) == [64.0, 64.0]


def ranks_update(rank, world_size):
    mine = [DelayedScaling(History(length=2), 2 + world_size), DelayedScaling(History(length=5), 1)]
    mine[0].scales_for(torch.tensor([1.0 + rank, 7.0 - rank] + [1.0] * world_size))
    # Whoever has a NaN, of whatever sign, it is above all.
    mine[0].amax_history[2 + rank, 0] = torch.tensor(math.nan) * (-1) ** rank
    mine[1].scales_for(torch.tensor([2.0**rank]))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        update_scales(nn.ModuleList(mine), dist.group.WORLD)
    histories = [one.amax_history[:, -1].tolist() for one in mine]
    return calls.call_count, [one.scales.tolist() for one in mine], histories


def test_one_maximum_for_all_tensors_of_all_states():
    world_size = 3
    results = run_on_ranks(ranks_update, world_size)
    expected = [[448 / world_size, 64.0] + [0.0] * world_size, [448 / 2 ** (world_size - 1)]]
    for calls, scales, histories in results:
        assert calls == 1
        assert scales == [torch.tensor(one).tolist() for one in expected]
        assert all(map(math.isnan, histories[0][2:]))
