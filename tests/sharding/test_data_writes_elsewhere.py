"""`.data` writes that a forward makes through other modules and objects last, as its own do."""

import copy
import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS

BF16 = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.linspace(0.5, 1.5, 36).view(6, 6))

    def decay(self) -> None:
        self.code.data.mul_(0.5)

    @functools.cached_property
    def decayed(self) -> bool:
        self.decay()
        return True

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.code


class Decay:
    def apply_to(self, module: Codebook) -> None:
        module.code.data.mul_(0.5)

    @staticmethod
    def once(module: Codebook) -> None:
        module.code.data.mul_(0.5)


class DecayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, code: Tensor) -> Tensor:  # type: ignore[override]
        code.data.mul_(0.5)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _decay(module: Codebook) -> None:
    module.code.data.mul_(0.5)


tools = types.ModuleType("tools")
vars(tools)["shrink"] = _decay


class Model(nn.Module):
    """Decays the codebook in its own forward, in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook()
        self.head = nn.Linear(6, 6)
        self.add()

    def add(self) -> None:
        pass

    def write(self, x: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return self.head(self.codebook(x))


class Method(Model):
    def write(self, x: Tensor) -> None:
        self.codebook.decay()


class Property(Model):
    def write(self, x: Tensor) -> None:
        assert self.codebook.decayed


class PlainObject(Model):
    def add(self) -> None:
        self.rule = Decay()

    def write(self, x: Tensor) -> None:
        self.rule.apply_to(self.codebook)


class FunctionsInList(Model):
    def add(self) -> None:
        self.rules = [functools.partial(functools.partial(_decay))]

    def write(self, x: Tensor) -> None:
        for rule in self.rules:
            rule(self.codebook)


class OfPythonModule(Model):
    def write(self, x: Tensor) -> None:
        tools.shrink(self.codebook)


class OfClass(Model):
    def write(self, x: Tensor) -> None:
        Decay.once(self.codebook)


class AutogradFunction(Model):
    def write(self, x: Tensor) -> None:
        DecayFunction.apply(x, self.codebook.code)


WAYS: tuple[Callable[[], Model], ...] = (
    Method,
    Property,
    PlainObject,
    FunctionsInList,
    OfPythonModule,
    OfClass,
    AutogradFunction,
)


def check(zero: int, way: Callable[[], Model], policy: ss.MixedPrecisionPolicy | None) -> None:
    torch.manual_seed(0)
    plain = way()
    sharded = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, sharded)]
    ss.fully_shard(sharded, optimizers[1], zero_dp_strategy=zero, mixed_precision_policy=policy)
    rtol = 1e-5 if policy is None else 8 * torch.finfo(torch.bfloat16).eps
    for _ in range(2):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        code = ss.full_state_dict(sharded)["codebook.code"]
        torch.testing.assert_close(code, plain.codebook.code.detach(), rtol=rtol, atol=1e-6)


def train(rank: int, world_size: int, way: Callable[[], Model]) -> None:
    for zero in LEVELS[world_size]:
        for policy in (None, BF16):
            check(zero, way, policy)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_writes_by_code_outside_the_modules_class_last(
    way: Callable[[], Model], world_size: int
) -> None:
    run_on_ranks(train, world_size, way)


class InRegistered(Codebook):
    def encode(self, x: Tensor) -> Tensor:
        self.decay()
        return self(x)


def encode(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = InRegistered()
        ss.fully_shard(model, zero_dp_strategy=zero)
        ss.register_forward_method(model, "encode")
        before = ss.full_state_dict(model)["code"]
        for _ in range(2):
            model.encode(torch.ones(2, 6)).sum().backward()
        assert torch.equal(ss.full_state_dict(model)["code"], before / 4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_writes_by_a_registered_method_last(world_size: int) -> None:
    run_on_ranks(encode, world_size)
