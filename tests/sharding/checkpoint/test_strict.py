"""What only the model or only the checkpoint has, and what would come back otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import sidestream as ss
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import named_state
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
    state = named_state(names_of_params(model), optimizer)["state"]
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


class Odd(Tensor):
    """A subclass that computes as its base does."""


LAYOUTS: dict[str, Tensor] = {
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "transposed subclass": torch.arange(6.0).view(2, 3).t().as_subclass(Odd),
    "conjugated": torch.arange(6.0).to(torch.complex64).mul(1 + 2j).conj(),
    "negated": torch.arange(6.0).to(torch.complex64).mul(1 + 2j).conj().imag,
    "part of another": torch.arange(20.0)[3:9],
    "repeated": torch.ones(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_of_every_layout_come_back_with_their_values(layout: str, tmp_path: Path) -> None:
    saved, loaded = nn.Module(), nn.Module()
    saved.register_buffer("x", LAYOUTS[layout])
    loaded.register_buffer("x", torch.zeros_like(LAYOUTS[layout].clone().resolve_conj()))
    ss.save_checkpoint(tmp_path / "c", saved)
    ss.load_checkpoint(tmp_path / "c", loaded)
    assert torch.equal(loaded.x, saved.x)


UNSTORABLE: dict[str, Tensor] = {
    "sparse": torch.eye(3).to_sparse(),
    "without values": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_tensors_that_are_not_their_elements_are_refused(kind: str, tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("x", UNSTORABLE[kind])
    with pytest.raises(TypeError, match=r"^model\.x: expected a tensor whose elements are all"):
        ss.save_checkpoint(tmp_path / "c", module)
    assert not list(tmp_path.iterdir())


def test_optimizer_options_of_another_kind_are_refused(tmp_path: Path) -> None:
    model, optimizer = make("a")
    optimizer.param_groups[0]["lr"] = "fast"
    ss.save_checkpoint(tmp_path / "c", model, optimizer)
    other, other_optimizer = make("a", seed=1)
    with pytest.raises(ValueError, match="expected a number as the option lr, got 'fast'"):
        ss.load_checkpoint(tmp_path / "c", other, other_optimizer)


def in_groups(
    kind: type[torch.optim.Optimizer], *names: tuple[str, ...], **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of "a" and "b" with the groups of an optimizer that are named."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
    groups = [{"params": [model.get_parameter(n) for n in part], "lr": 0.5} for part in names]
    optimizer = kind(groups, **options)
    ss.fully_shard(model, optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


A, B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
OTHERS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "another optimizer": lambda: in_groups(torch.optim.SGD, A + B, momentum=0.9),
    "fewer groups": lambda: in_groups(torch.optim.AdamW, A + B),
    "more groups": lambda: in_groups(torch.optim.AdamW, A, B[:1], B[1:]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_without_strict_another_optimizer_or_other_groups_stay_as_they_are(
    other: str, tmp_path: Path
) -> None:
    ss.save_checkpoint(tmp_path / "c", *in_groups(torch.optim.AdamW, A, B))
    model, optimizer = OTHERS[other]()
    before = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    kept = {k: v for name in "ab" for k, v in parts(model, optimizer, name).items() if " " in k}
    with pytest.warns(UserWarning, match="optimizer stays as it is, its state too"):
        ss.load_checkpoint(tmp_path / "c", model, optimizer, strict=False)
    after = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    assert repr(after) == repr(before)
    now = {k: v for name in "ab" for k, v in parts(model, optimizer, name).items() if " " in k}
    assert same(now, kept)


def test_without_strict_a_parameter_in_another_group_is_refused(tmp_path: Path) -> None:
    ss.save_checkpoint(tmp_path / "c", *in_groups(torch.optim.AdamW, A, B))
    model, optimizer = in_groups(torch.optim.AdamW, A[:1], (*A[1:], *B))
    with pytest.raises(ValueError, match=r"group 0: missing \[\], unexpected \['a.bias'\]"):
        ss.load_checkpoint(tmp_path / "c", model, optimizer, strict=False)


PLAIN: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str]] = {
    "numbers for names": (
        lambda m, o: {"model": m.state_dict(), "optim": o.state_dict()},
        r"unexpected: optim.state.0.step.*numbers for names: save what get_optimizer_state_dict",
    ),
    "flattened": (
        lambda m, o: dict(
            zip(
                ("model", "optim"),
                get_state_dict(m, o, options=StateDictOptions(flatten_optimizer_state_dict=True)),
                strict=True,
            )
        ),
        r"not flattened\) there are: optim.state.a.weight.step",
    ),
    "another key": (
        lambda m, o: dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True)),
        r"missing: optim.param_groups.0.params.*there are: optimizer.state",
    ),
    "no key": (lambda m, o: m.state_dict(), r"missing: model.a.weight.*there are: a.weight"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", PLAIN)
def test_plain_checkpoints_under_other_keys_say_what_is_there(layout: str, tmp_path: Path) -> None:
    state, message = PLAIN[layout]
    model, optimizer = in_groups(torch.optim.AdamW, A + B)
    dcp.save(state(model, optimizer), checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        ss.load_checkpoint(tmp_path / "c", model, optimizer)


def test_0d_parameters_alone_keep_their_counters(tmp_path: Path) -> None:
    model = nn.Module()
    model.gain = nn.Parameter(torch.tensor(2.0))
    model.forward = lambda: model.gain * 3  # type: ignore[method-assign]
    optimizer = torch.optim.NAdam(model.parameters())
    ss.fully_shard(model, optimizer)
    model().backward()
    optimizer.step()
    ss.save_checkpoint(tmp_path / "c", model, optimizer)
    before = named_state(names_of_params(model), optimizer)["state"]["gain"]
    expected = {key: getattr(x, "local", x).clone() for key, x in before.items()}
    optimizer.state.clear()
    ss.load_checkpoint(tmp_path / "c", model, optimizer)
    after = named_state(names_of_params(model), optimizer)["state"]["gain"]
    assert {key: getattr(x, "local", x) for key, x in after.items()} == expected
