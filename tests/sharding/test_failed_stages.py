"""A stage that raises in the middle of a work is not taken for done, and leaves no memory."""

from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.unit import UnitState
from sidestream.sharding.wire import PlainWire
from sidestream.tests.ranks import run_on_ranks


def sharded(zero: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero, **options)
    return model


def fail() -> NoReturn:
    raise ArithmeticError


def a_later_hop_fails(rank: int, world_size: int) -> None:
    model, x = sharded(3), torch.ones(2, 6)
    expected = model(x).detach()
    unit = runtime_of(model).units[1]
    stages = unit.buffers.stages

    def failing(**how: bool) -> list[Any]:
        return [*stages(**how), fail]

    with mock.patch.object(unit.buffers, "stages", failing), pytest.raises(ArithmeticError):
        model(x)
    assert unit.state is UnitState.SHARDED and unit.buffers.gathered.is_shrunk
    assert torch.equal(model(x), expected), "the next use gathers anew"


def test_a_gather_whose_later_stage_fails_is_begun_anew() -> None:
    run_on_ranks(a_later_hop_fails, 2)


class Failing(PlainWire):
    fails = False

    def reduce(self, out: Tensor, rows: Any, **options: Any) -> None:
        if self.fails:
            raise ArithmeticError
        super().reduce(out, rows, **options)


def a_sum_fails(rank: int, world_size: int) -> None:
    wire = Failing(torch.float32)
    model = sharded(2, mixed_precision_policy=ss.MixedPrecisionPolicy(grad_wire=wire))
    x, pool = torch.ones(2, 6), runtime_of(model).pool

    def grads() -> list[Tensor]:
        model(x).sum().backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    def live_bytes() -> int:
        model.zero_grad()
        with torch.no_grad():
            model(x)
        return pool.live_bytes

    expected = grads()
    at_rest = live_bytes()
    wire.fails = True
    with pytest.raises(ArithmeticError):
        grads()
    assert live_bytes() == at_rest
    wire.fails = False
    assert all(map(torch.equal, grads(), expected))


def test_an_exchange_whose_sum_fails_lets_go_of_its_buffers() -> None:
    run_on_ranks(a_sum_fails, 2)
