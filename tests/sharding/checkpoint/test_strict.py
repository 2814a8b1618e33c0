"""What only the model or only the checkpoint has, and what would come back otherwise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.optimizer_state import named_state
from sidestream.tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(120)


def make(*names: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    ss.fully_shard(model, optimizer)
    for _ in range(seed + 1):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def parts(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> dict[str, Tensor]:
    """All that is `name`'s: weights and optimizer state."""
    state = named_state(runtime_of(model), optimizer)["state"]
    found = {
        f"{key} {entry}": getattr(value, "local", value).clone()
        for key, entries in state.items()
        for entry, value in entries.items()
    }
    found |= ss.full_state_dict(model)
    return {key: value for key, value in found.items() if key.startswith(f"{name}.")}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def load_leniently(rank: int, world_size: int, folder: str) -> None:
    saved, saved_optimizer = make("a", "b")
    ss.save_checkpoint(folder, saved, saved_optimizer, extra=3)
    model, optimizer = make("b", "c", seed=1)
    kept = parts(model, optimizer, "c")
    with pytest.raises(ValueError, match=r"missing: model.c.weight") as refused:
        ss.load_checkpoint(folder, model, optimizer)
    assert "unexpected: model.a" in str(refused.value)
    with pytest.warns(UserWarning, match=r"left alone.*missing: model\.c\.weight.*model\.a"):
        assert ss.load_checkpoint(folder, model, optimizer, strict=False) == 3
    assert same(parts(model, optimizer, "c"), kept)
    assert same(parts(model, optimizer, "b"), parts(saved, saved_optimizer, "b"))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_only_one_side_has_is_left_alone_without_strict(tmp_path: Path) -> None:
    for world_size in (1, 2, 3):
        run_on_ranks(load_leniently, world_size, str(tmp_path / f"{world_size}"), timeout_s=60)


def test_without_strict_a_checkpoint_of_weights_alone_leaves_the_optimizer(tmp_path: Path) -> None:
    saved, _ = make("a")
    ss.save_checkpoint(tmp_path / "c", saved)
    model, optimizer = make("a", seed=1)
    before = {k: v for k, v in parts(model, optimizer, "a").items() if " " in k}
    with pytest.warns(UserWarning, match="missing: optim"):
        ss.load_checkpoint(tmp_path / "c", model, optimizer, strict=False)
    after = parts(model, optimizer, "a")
    assert same({key: after[key] for key in before}, before)
    assert torch.equal(after["a.weight"], ss.full_state_dict(saved)["a.weight"])


def test_another_shape_is_refused_without_strict_too(tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path / "c", nn.Sequential(nn.Linear(4, 5)))
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"of model.0.weight: expected \(4, 4\), got \(5, 4\)"):
        ss.load_checkpoint(tmp_path / "c", model, strict=False)
    with pytest.raises(TypeError, match="strict: expected True or False, got 'no'"):
        ss.load_checkpoint(tmp_path / "c", model, strict="no")  # type: ignore[arg-type]


class WithState(nn.Module):
    """Has extra state, and a buffer that does not lie in row-major order."""

    def __init__(self, state: Any, seed: int = 0) -> None:
        super().__init__()
        self.state = state
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t() + seed)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


KEPT: dict[str, Any] = {
    "dict": {"a": {"b": 1}, "c": torch.arange(3)},
    "list of dicts": {"a": [{"b": torch.ones(2)}, 3]},
    "tuple around anything": ({1: {}, "x": []},),
    "empty list": {"a": []},
    "None": None,
    "tensor": torch.ones(3),
}


@pytest.mark.parametrize("state", KEPT.values(), ids=KEPT)
def test_extra_state_comes_back_as_it_is(state: Any, tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path / "c", WithState(state))
    other = WithState(torch.zeros(3) if isinstance(state, Tensor) else 5, seed=1)
    ss.load_checkpoint(tmp_path / "c", other)
    assert repr(other.state) == repr(state)
    assert torch.equal(other.turned, torch.arange(6.0).view(2, 3).t())


LOST: dict[str, tuple[Any, str]] = {
    "number as key": ({"a": {1: 2}}, "model._extra_state.a: .*got the key 1"),
    "number as first key": ({1: 2}, "model._extra_state: .*got the key 1"),
    "empty dict": ({"a": {"b": {}}}, r"model._extra_state.a.b: .*got an empty one.*\(state,\)"),
}


@pytest.mark.parametrize("case", LOST.values(), ids=LOST)
def test_extra_state_that_would_come_back_otherwise_is_refused(
    case: tuple[Any, str], tmp_path: Path
) -> None:
    state, message = case
    with pytest.raises(TypeError, match=message):
        ss.save_checkpoint(tmp_path / "c", WithState(state))
    assert not list(tmp_path.iterdir())
