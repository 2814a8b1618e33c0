"""Parameters held where `fully_shard` does not look: a backward to one is refused by name."""

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks


@dataclasses.dataclass
class Holder:
    weight: Tensor


class Model(nn.Module):
    """Uses the weight of its layer once more, `again`, out of a place of its own."""

    def __init__(self, hold: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.again = hold(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.layer(x)))


class InAttribute:
    """Reads the weight out of an object that holds it."""

    def __init__(self, holder: object, read: Callable[[object], Tensor]) -> None:
        self.holder, self.read = holder, read

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.read(self.holder)


def in_hook(weight: Tensor) -> Callable[[Tensor], Tensor]:
    module = nn.Identity()
    module.register_forward_hook(lambda _module, _args, output: output @ weight)
    return module


HOLDERS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "dataclass": lambda w: InAttribute(Holder(w), lambda holder: holder.weight),
    "namespace": lambda w: InAttribute(types.SimpleNamespace(w=w), lambda holder: holder.w),
    "deque": lambda w: InAttribute(collections.deque([w]), lambda holder: holder[0]),
    "partial": lambda w: functools.partial(nn.functional.linear, weight=w),
    "closure": lambda w: lambda x: x @ w,
    "hook": in_hook,
}


def refuse(rank: int, world_size: int, name: str) -> None:
    for zero in range(4):
        model = Model(HOLDERS[name])
        ss.fully_shard(model, zero_dp_strategy=zero)
        before = ss.full_state_dict(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"parameter 'layer.weight': .* did not see"):
                model(torch.ones(2, 6)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        after = ss.full_state_dict(model)
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_backward_to_a_replaced_parameter_is_refused(name: str, world_size: int) -> None:
    run_on_ranks(refuse, world_size, name)


def test_a_copy_from_before_trains_on() -> None:
    model = nn.Linear(6, 6)
    twin = copy.deepcopy(model)
    ss.fully_shard_model(model)
    twin(torch.ones(2, 6)).sum().backward()
    assert all(param.grad is not None for param in twin.parameters())


def test_a_second_model_with_a_parameter_of_a_sharded_one_is_refused() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    ss.fully_shard_model(first)
    with pytest.raises(ValueError, match=r"'weight' was 'weight' of a model that is sharded"):
        ss.fully_shard_model(second)
