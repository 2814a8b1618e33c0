"""Modules and parameters that are added, replaced, moved or taken out after `fully_shard`."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.modules.tree_watch import watches_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act: nn.Module = nn.Tanh()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head: nn.Module = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tail(x))


class Adapter(nn.Module):
    """Stands in the place of a layer, as those of PEFT do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.low(x)


def deep_attribute(model: nn.Module) -> None:
    model.blocks[1].down.scale = nn.Parameter(torch.ones(()), requires_grad=False)


def registered_by_hand(model: nn.Module) -> None:
    model.blocks[0].register_parameter("gain", nn.Parameter(torch.ones(WIDTH)))


def new_head(model: nn.Module) -> None:
    model.head = nn.Linear(WIDTH, 2)


def adapter(model: nn.Module) -> None:
    setattr(model.blocks[2], "up", Adapter(model.blocks[2].up))  # noqa: B010 - as PEFT does it


def appended(model: nn.Module) -> None:
    model.blocks.append(Block())


def inserted(model: nn.Module) -> None:
    model.blocks.insert(1, Block())


def inserted_in_a_sequence(model: nn.Module) -> None:
    model.tail.insert(0, nn.Linear(WIDTH, WIDTH))


def in_what_was_added(model: nn.Module) -> None:
    model.head = nn.Sequential(model.head)
    model(torch.ones(1, WIDTH))
    model.head.append(nn.Linear(WIDTH, 2))


def tied_in_a_new_place(model: nn.Module) -> None:
    model.extra = model.head.weight


def tied(model: nn.Module) -> None:
    model.head.weight = model.embedding.weight


def replaced(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def taken_out_alone(model: nn.Module) -> None:
    model.embedding.bias = None


BESIDES = "expected the parameters that it had when fully_shard sharded it, got {} besides"
OTHER = "parameter '{}': expected the object that fully_shard put there, got"
ADDED: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "attribute": (deep_attribute, BESIDES.format("'blocks.1.down.scale'")),
    "register_parameter": (registered_by_hand, BESIDES.format("'blocks.0.gain'")),
    "new head": (new_head, BESIDES.format("'head.weight', 'head.bias'")),
    "adapter": (adapter, BESIDES.format("'blocks.2.up.low.weight'")),
    "append": (appended, BESIDES.format("'blocks.3.up.weight', .*'blocks.3.down.bias'")),
    "insert": (inserted, BESIDES.format("'blocks.1.up.weight', .*'blocks.1.down.bias'")),
    "insert in a sequence": (
        inserted_in_a_sequence,
        BESIDES.format("'tail.0.weight', 'tail.0.bias'"),
    ),
    "in what was added": (in_what_was_added, BESIDES.format("'head.1.weight', 'head.1.bias'")),
    "tied in a new place": (tied_in_a_new_place, BESIDES.format("'extra'")),
    "tied": (tied, OTHER.format("head.weight")),
    "replaced": (replaced, OTHER.format("head.weight")),
    "taken out alone": (taken_out_alone, OTHER.format("embedding.bias")),
}


def sharded(zero: int) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    ss.fully_shard(model, fsdp_unit_modules=[Block], zero_dp_strategy=zero)
    return model


def refuses(rank: int, world_size: int, kind: str, folder: str) -> None:
    change, message = ADDED[kind]
    for zero in LEVELS[world_size]:
        model = sharded(zero)
        model(torch.ones(1, WIDTH)).sum().backward()
        change(model)
        path = Path(folder) / f"{zero}"
        uses: list[Callable[[], Any]] = [
            lambda: model(torch.ones(1, WIDTH)),  # noqa: B023 - called at once
            lambda: ss.fully_shard_optimizer(
                torch.optim.SGD([model.blocks[0].up.weight], lr=0.1)  # noqa: B023
            ),
            lambda: ss.save_checkpoint(path, model),  # noqa: B023
            lambda: ss.full_state_dict(model),  # noqa: B023
            lambda: ss.full_state_dict(nn.Sequential(model)),  # noqa: B023
            lambda: ss.summary(model),  # noqa: B023
        ]
        for use in (*uses, uses[0]):
            with pytest.raises(RuntimeError, match=message):
                use()
        assert not path.exists()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ADDED)
def test_what_was_added_is_refused_by_name_wherever_it_would_count(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    run_on_ranks(refuses, world_size, kind, str(tmp_path))


def test_a_unit_that_is_called_by_itself_refuses_too() -> None:
    model = sharded(3)
    model.blocks[0].gain = nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match=BESIDES.format("'blocks.0.gain'")):
        model.blocks[0](torch.ones(1, WIDTH))
    del model.blocks[0].gain
    assert model(torch.ones(1, WIDTH)).shape == (1, WIDTH), "taken out again, it is forgotten"


def without_parameters(model: nn.Module) -> None:
    model.blocks[0].act = nn.Sequential(nn.Dropout(0.0), nn.GELU())
    model.tail.insert(1, nn.Identity())


def without_the_head(model: nn.Module) -> None:
    model.head = nn.Identity()


def without_a_unit(model: nn.Module) -> None:
    del model.blocks[1]


def in_another_order(model: nn.Module) -> None:
    model.blocks = nn.ModuleList(reversed(model.blocks))


def wrapped(model: nn.Module) -> None:
    model.blocks[1] = nn.Sequential(model.blocks[1], nn.Identity())


ALLOWED: dict[str, Callable[[nn.Module], None]] = {
    "modules without parameters": without_parameters,
    "a head taken out": without_the_head,
    "a unit taken out": without_a_unit,
    "another order": in_another_order,
    "a unit wrapped": wrapped,
}


def trains(rank: int, world_size: int, kind: str) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        twins = Twins(rank, world_size, Model(), zero, [Block])
        twins.train(square_loss, (2, WIDTH), steps=2)
        for model in (twins.plain, twins.sharded):
            ALLOWED[kind](model)
        for step in range(2, 4):
            twins.backward(square_loss, twins.data(step, 2, WIDTH))
            twins.check_grads()
            twins.step()
        state = ss.full_state_dict(twins.sharded)
        for name, value in twins.plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ALLOWED)
def test_what_adds_no_parameters_goes_on_as_in_a_plain_model(kind: str, world_size: int) -> None:
    run_on_ranks(trains, world_size, kind)


@pytest.mark.parametrize("kind", ["a head taken out", "a unit taken out", "another order"])
def test_optimizer_state_is_not_saved_under_names_of_others(kind: str, tmp_path: Path) -> None:
    model = Model()
    _, optimizer = ss.fully_shard(
        model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[Block]
    )
    ALLOWED[kind](model)
    names = "'head.weight'" if kind == "a head taken out" else "'blocks.0.*'"
    names = "'blocks.1.up.weight'" if kind == "a unit taken out" else names
    with pytest.raises(RuntimeError, match=rf"got {names}.* taken out or renamed, while the opt"):
        ss.save_checkpoint(tmp_path / "c", model, optimizer)
    ss.save_checkpoint(tmp_path / "c", model)
    expected = ss.full_state_dict(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    ss.load_checkpoint(tmp_path / "c", model)
    for name, value in ss.full_state_dict(model).items():
        assert torch.equal(value, expected[name]), name


def test_a_module_that_is_registered_anew_in_every_forward_costs_no_walk() -> None:
    model = sharded(3)
    (watch,) = watches_of(model)
    model.current = model.blocks[0]
    assert not watch.changed, "a module that is known already"
    model.current = nn.Dropout()
    assert watch.changed
    model(torch.ones(1, WIDTH))
    assert not watch.changed
    copy.deepcopy(model.blocks[0].act)
    nn.Sequential(nn.Linear(2, 2))
    assert not watch.changed, "other models"


def test_a_watch_ends_with_its_model() -> None:
    model = sharded(3)
    act = model.blocks[0].act
    (watch,) = watches_of(model)
    gc.collect()
    gc.disable()
    try:
        del model, watch
        assert not watches_of(act)
    finally:
        gc.enable()
    nn.Sequential(act)
