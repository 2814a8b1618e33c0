"""What `fully_shard` takes as a model, as its units and as parameters, and how it says no."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import MLP, Attention, Block, Transformer
from sidestream.tests.sharding.twins import Twins, square_loss


def units_of(model: nn.Module) -> list[str]:
    return [unit.name for unit in ss.summary(model).units]


BLOCKS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]
NAMES: dict[str, Any] = {
    "a name": "Block",
    "names, some of other models": {"Block", "LlamaDecoderLayer"},
    "a name and its class": ["Block", Block],
}


@pytest.mark.parametrize("given", NAMES.values(), ids=NAMES)
def test_bare_names_mean_every_class_of_that_name(given: Any) -> None:
    model = Transformer()
    ss.fully_shard(model, fsdp_unit_modules=given)
    assert units_of(model) == BLOCKS


def test_a_bare_name_means_all_classes_that_share_it() -> None:
    other = type("Block", (nn.Linear,), {})
    model = nn.Sequential(Block(), other(12, 12), nn.Linear(12, 12))
    ss.fully_shard(model, fsdp_unit_modules="Block")
    assert units_of(model) == ["(root)", "0", "1"]


def sets_of_classes(rank: int, world_size: int) -> None:
    model = Transformer()
    given = [{Attention, MLP}, {MLP, Attention}][rank % 2]
    ss.fully_shard(model, fsdp_unit_modules=given if rank else [MLP, Attention])


def test_the_order_of_unit_classes_is_no_difference_between_ranks() -> None:
    run_on_ranks(sets_of_classes, 3)


class Bare(nn.Module):
    """Has parameters and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


class Called(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": lambda: nn.ModuleList([nn.Linear(3, 3)]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(3, 3)}),
    "ParameterList": lambda: nn.ParameterList([torch.ones(3)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.ones(3)}),
    "Bare": Bare,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_refuses_a_model_without_a_forward(name: str) -> None:
    with pytest.raises(ValueError, match=rf"a model with a forward, got {name}, which is never"):
        ss.fully_shard(CONTAINERS[name]())


def test_refuses_a_unit_without_a_forward() -> None:
    model = nn.Sequential(Called(), Bare())
    with pytest.raises(ValueError, match=r"with a forward, got '1' of class Bare, which is never"):
        ss.fully_shard(model, fsdp_unit_modules=[Bare])
    ss.fully_shard(model, fsdp_unit_modules=[Called])


def test_takes_a_forward_of_the_instance() -> None:
    model = Bare()
    model.forward = types.MethodType(lambda self, x: self.layer(x), model)
    ss.fully_shard(model)
    assert model(torch.ones(3)).shape == (3,)


class Quantised(Tensor):
    """Has a dense tensor inside, as quantised weights have their codes."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Quantised":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda x: x.inner if isinstance(x, cls) else x  # noqa: E731
        result = func(*tree_map(unwrap, args), **(kwargs or {}))
        return cls(result) if isinstance(result, Tensor) else result


class Extended(nn.Parameter):
    """A parameter that wants to take part in gathers."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise NotImplementedError


class Marked(nn.Parameter):
    """Only marks; still a plain parameter."""


class Codes(nn.Parameter):
    """Packed integers with rules of their own, as bitsandbytes has them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def with_parameter(value: Tensor) -> nn.Module:
    model = Called()
    model.extra = value if isinstance(value, nn.Parameter) else nn.Parameter(value)
    return model


def with_buffer(value: Tensor) -> nn.Module:
    model = Called()
    model.register_buffer("table", value)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quantised": (
        lambda: with_parameter(Quantised(torch.ones(2, 2))),
        r"'extra' is of class Quantised, which computes by rules of its own",
    ),
    "gather extension": (
        lambda: with_parameter(Extended(torch.ones(2))),
        r"'extra' is of class Extended, .* pass a model of plain ones",
    ),
    "quantised buffer": (
        lambda: with_buffer(Quantised(torch.ones(2))),
        r"buffer 'table' is of class Quantised",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)),
        r"'1.weight' has no shape yet: run one forward of its lazy module first; '1.bias'",
    ),
    "lazy buffer": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
        r"buffer '1.running_mean' has no shape yet",
    ),
    "complex": (
        lambda: with_parameter(torch.ones(2, dtype=torch.complex64)),
        r"'extra' is complex, of dtype torch.complex64: hold its real form, torch.view_as_real",
    ),
    "float8": (
        lambda: with_parameter(torch.ones(2).to(torch.float8_e4m3fn)),
        r"'extra' has dtype torch.float8_e4m3fn: expected float32, bfloat16 or float16",
    ),
    "sparse": (
        lambda: with_parameter(torch.eye(2).to_sparse()),
        r"'extra' has layout torch.sparse_coo: expected a dense one; call to_dense",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refuses_by_name_what_it_cannot_shard(case: tuple[Callable[[], nn.Module], str]) -> None:
    make, message = case
    model = make()
    before = [id(param) for param in model.parameters()]
    with pytest.raises(ValueError, match=f"^fully_shard cannot take these parameters: {message}"):
        ss.fully_shard(model)
    assert [id(param) for param in model.parameters()] == before


TAKEN: dict[str, Callable[[], Tensor]] = {
    "a class of marks": lambda: Marked(torch.ones(2)),
    "packed integers": lambda: Codes(torch.ones(2, dtype=torch.uint8), requires_grad=False),
    "frozen complex": lambda: nn.Parameter(
        torch.ones(2, dtype=torch.complex64), requires_grad=False
    ),
}


def takes(rank: int, world_size: int, kind: str) -> None:
    for zero in range(4):
        torch.manual_seed(0)
        twins = Twins(rank, world_size, with_parameter(TAKEN[kind]()), zero, None)
        for step in range(2):
            twins.backward(square_loss, twins.data(step, 2, 3))
            twins.step()
        for name, param in ss.full_state_dict(twins.sharded).items():
            torch.testing.assert_close(param, twins.plain.state_dict()[name])


@pytest.mark.parametrize("kind", TAKEN)
def test_takes_parameters_without_rules_and_leaves_integers_alone(kind: str) -> None:
    run_on_ranks(takes, 2, kind)
