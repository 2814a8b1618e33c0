"""What `load_state_dict` of a sharded model and its optimizer takes: whole state, parts of another
layout, DTensors; what it refuses, and that nothing has changed then.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from sidestream.sharding.tensor import torch_state_dict
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.torch_state_dict.models import (
    FROM_RANK_0,
    FULL,
    MARKS,
    Both,
    are_equal,
    make_plain,
    make_sharded,
    train,
    whole,
)

pytestmark = MARKS


def _in_one_unit(seed: int) -> Both:
    return make_sharded(seed, 3, fsdp_unit_modules=None)


def _fsdp2(seed: int) -> Both:
    torch.manual_seed(seed)
    model, _ = make_plain(seed)
    fsdp2_fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


SOURCES: dict[str, Callable[[int], Both]] = {
    "a plain twin": make_plain,
    "one unit": _in_one_unit,
    "replicated": lambda seed: make_sharded(seed, 0),
    "FSDP2": _fsdp2,
}


def _load_every_source(rank: int, world: int) -> list[str]:
    wrong = []
    for name, make in SOURCES.items():
        source = train(train(make(0), 0), 1)
        expected = whole(source)
        later = whole(train(train(train(make_plain(0), 0), 1), 2))
        for zero in range(4):
            model, optimizer = both = train(make_sharded(1, zero), 5)
            model.load_state_dict(source[0].state_dict())
            optimizer.load_state_dict(source[1].state_dict())
            for param in model.parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = optimizer.state[param][key]
                    if not isinstance(moment, ShardedTensor) or not param.has_layout_of(moment):
                        wrong.append(f"{name}, ZeRO-{zero}: {param.name} {key} is {moment}")
            if not are_equal(whole(both), expected):
                wrong.append(f"{name}, ZeRO-{zero}: loaded")
            if not are_equal(whole(train(both, 2)), later):
                wrong.append(f"{name}, ZeRO-{zero}: a step later")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_whole_state_and_parts_of_another_layout_are_cut_to_this_ranks(world: int) -> None:
    assert run_on_ranks(_load_every_source, world, timeout_s=60) == [[]] * world


def _load_in_place(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    for zero in range(4):
        source, both = train(train(make_sharded(0, zero), 0), 1), train(make_sharded(1, zero), 5)
        path = f"{folder}/{zero}"
        dcp.save(dict(zip("mo", (x.state_dict() for x in source), strict=True)), checkpoint_id=path)
        dcp.load(dict(zip("mo", (x.state_dict() for x in both), strict=True)), checkpoint_id=path)
        if not are_equal(whole(both), whole(source)):
            wrong.append(f"ZeRO-{zero}: loaded")
        if not are_equal(whole(train(both, 2)), whole(train(source, 2))):
            wrong.append(f"ZeRO-{zero}: a step later")
    return wrong


def test_tensors_and_counters_are_loaded_in_place_without_load_state_dict(tmp_path: Path) -> None:
    assert run_on_ranks(_load_in_place, 2, str(tmp_path)) == [[]] * 2


def _spread_whole_state(rank: int, world: int) -> list[str]:
    """What `load_state_dict` was given of the whole tensors that torch spreads."""
    plain = train(make_plain(0))
    states = copy.deepcopy((get_model_state_dict(plain[0]), get_optimizer_state_dict(*plain)))
    kinds = set()
    for options in (FULL, FROM_RANK_0):
        model, optimizer = make_sharded(1, 3)
        empty: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        mine = states if rank == 0 or options is FULL else empty

        def see_model(_module: nn.Module, state: dict[str, Any], *_: object) -> None:
            kinds.update(type(value).__name__ for value in state.values())

        def see_optimizer(_optimizer: object, state: dict[str, Any]) -> None:
            for entries in state["state"].values():
                kinds.add(type(entries["exp_avg"]).__name__)

        model.register_load_state_dict_pre_hook(see_model)
        optimizer.register_load_state_dict_pre_hook(see_optimizer, prepend=True)
        set_model_state_dict(model, copy.deepcopy(mine[0]), options=options)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(mine[1]), options=options)
        assert are_equal(whole((model, optimizer)), whole(plain))
    return sorted(kinds)


def test_of_a_whole_state_that_torch_spreads_a_rank_keeps_its_part_alone() -> None:
    assert run_on_ranks(_spread_whole_state, 2) == [["ShardedTensor"]] * 2


def _refused(rank: int, world: int) -> list[str]:
    wrong = []
    for zero in range(4):
        model, optimizer = both = train(make_sharded(0, zero))
        before = whole(both)
        other, others_optimizer = train(make_plain(1, (6, 8)))
        missing = {key: x for key, x in model.state_dict().items() if key != "4.bias"}
        no_groups: dict[str, Any] = {"state": {}, "param_groups": []}
        entry = r"'exp_avg' of '0.weight' to have its shape \(5, 3\) or one value, got \(6, 3\)"
        for load, state, text in (
            (optimizer.load_state_dict, others_optimizer.state_dict(), entry),
            (optimizer.load_state_dict, no_groups, "different number of parameter groups"),
            (_assign(model), model.state_dict(), "expected assign=False"),
            (model.load_state_dict, missing, r'Missing key\(s\) in state_dict: "4.bias"'),
            (_only_first(model), other.state_dict(), "size mismatch for 0.weight"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=text):
                load(state)
            if not are_equal(whole(both), before):
                wrong.append(f"{text}, ZeRO-{zero}")
        keys = set_model_state_dict(model, missing, options=StateDictOptions(strict=False))
        if keys.missing_keys != ["4.bias"]:
            wrong.append(f"not strict, ZeRO-{zero}: {keys}")
    return wrong


def _assign(model: nn.Module) -> Callable[..., Any]:
    return lambda state: model.load_state_dict(state, assign=True)


def _only_first(model: nn.Module) -> Callable[..., Any]:
    """Of a state dict, the two tensors that do not fit: torch loads what else there is."""
    return lambda state: model.load_state_dict({key: state[key] for key in ("0.weight", "0.bias")})


def test_what_does_not_fit_is_refused_and_nothing_has_changed() -> None:
    assert run_on_ranks(_refused, 2) == [[]] * 2


def _stream_in_pieces(rank: int, world: int) -> None:
    for zero in range(4):
        source, _ = make_plain(0)
        source.bfloat16()
        expected = [param.detach().float() for param in source.parameters()]
        model, _ = make_sharded(1, zero)
        state = source.state_dict() if rank == 0 else {}
        if rank == 0:
            state["0.weight"] = state["0.weight"].t().contiguous().t()
        with mock.patch.object(torch_state_dict, "_PIECE_NUMEL", 4):
            set_model_state_dict(model, state, options=FROM_RANK_0)
        for param, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.full_tensor(), value), (zero, param.name)
        x = torch.ones(2, 3)
        torch.testing.assert_close(model(x), source.float()(x))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rank_0_sends_whole_tensors_in_pieces(world: int) -> None:
    run_on_ranks(_stream_in_pieces, world)
