"""torch's state-dict API over every kind of parameter, group and buffer, beside a plain twin."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import sidestream
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.torch_state_dict.models import FULL, MARKS, Both, flat

pytestmark = MARKS


class _Kinds(nn.Module):
    """Tied, frozen, 0-d and empty parameters, buffers, and a block with a name of its compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = torch.compile(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.late = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("offset", torch.arange(6.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block._orig_mod(self.embed(tokens)) * self.scalar + self.late
        return self.head(self.norm(x)) + self.offset + self.empty.sum()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.1)


def _plain(seed: int) -> Both:
    torch.manual_seed(seed)
    model = _Kinds()
    return model, _adamw(model)


def _ours(seed: int, zero: int) -> Both:
    model, optimizer = _plain(seed)
    sidestream.fully_shard(
        model, optimizer, fsdp_unit_modules=[nn.Linear, nn.Embedding], zero_dp_strategy=zero
    )
    return model, optimizer


def _step(both: Both, seed: int) -> None:
    model, optimizer = both
    tokens = torch.randint(6, (5,), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().mean().backward()
    for param in model.parameters():
        if param.requires_grad:  # plain ones without a gradient count as zero
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = grad.bfloat16().to(grad.dtype)  # the average over three ranks is rounded
    optimizer.step()
    optimizer.zero_grad()


def _train(both: Both) -> Both:
    """Two steps, and two more with another parameter unfrozen."""
    for seed in range(4):
        if seed == 2:
            both[0].late.requires_grad_()
        _step(both, seed)
    return both


def _differences(case: str, expected: Any, got: Any) -> list[str]:
    expected, got = flat(expected), flat(got)
    wrong = sorted(f"{case}: {key}" for key in expected.keys() ^ got.keys())
    for key in expected.keys() & got.keys():
        want, have = expected[key], got[key]
        same = type(want) is type(have)
        if same and isinstance(want, Tensor):
            same = want.shape == have.shape and want.dtype == have.dtype and torch.equal(want, have)
        elif same:
            same = want == have
        if not same:
            wrong.append(f"{case}: {key}: expected {want}, got {have}")
    return wrong


def _beside_a_plain_twin(rank: int, world: int) -> list[str]:
    wrong = []
    for zero in range(4):
        plain, ours = _train(_plain(0)), _train(_ours(0, zero))
        for name, options in {
            "full": {},
            "flattened": {"flatten_optimizer_state_dict": True},
            "frozen": {"ignore_frozen_params": True},
        }.items():
            asked = StateDictOptions(full_state_dict=True, **options)
            wrong += _differences(
                f"{name}, ZeRO-{zero}",
                get_state_dict(*plain, options=asked),
                get_state_dict(*ours, options=asked),
            )
        expected = copy.deepcopy(get_state_dict(*plain, options=FULL))
        given = copy.deepcopy(get_state_dict(*ours, options=FULL))
        if given[0]["head.weight"].data_ptr() != given[0]["embed.weight"].data_ptr():
            wrong.append(f"tied, ZeRO-{zero}")
        for both, state in (((_ours(1, zero)), expected), (_plain(1), given)):
            both[0].late.requires_grad_()
            case = f"{'ours' if state is expected else 'plain'}, ZeRO-{zero}"
            model, optimizer = copy.deepcopy(state)
            set_state_dict(*both, model_state_dict=model, optim_state_dict=optimizer, options=FULL)
            wrong += _differences(f"{case}, loaded", expected, get_state_dict(*both, options=FULL))
            twin = _train(_plain(0))
            _step(twin, 7)
            _step(both, 7)
            wrong += _differences(
                f"{case}, a step later",
                get_state_dict(*twin, options=FULL),
                get_state_dict(*both, options=FULL),
            )
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_kind_of_parameter_is_taken_and_given_as_by_a_plain_model(world: int) -> None:
    assert run_on_ranks(_beside_a_plain_twin, world, timeout_s=60) == [[]] * world
