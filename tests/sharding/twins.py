"""A plain model and its sharded twin, trained side by side inside the ranks of a test."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.runtime import Runtime
from sidestream.sharding.unit import UnitState

Loss = Callable[[nn.Module, Tensor], Tensor]
SGD = {"lr": 0.1, "momentum": 0.9}
# The ZeRO levels that tests of what models do run at, by world size. On one rank levels differ by
# whether parameters are freed alone; three ranks are there for what they cut unevenly, the
# optimizer's part at 1, all at 3.
LEVELS = {1: (0, 3), 2: (0, 1, 2, 3), 3: (1, 3)}


class Twins:
    """`plain` sees every rank's data, `sharded` its own rank's; both step with SGD."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        model: nn.Module,
        zero: int,
        units: list[type[nn.Module]] | None,
        **options: Any,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.plain = copy.deepcopy(model)
        self.sharded = model
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), **SGD)
        self.optimizer = torch.optim.SGD(self.sharded.parameters(), **SGD)
        ss.fully_shard(
            self.sharded, self.optimizer, zero_dp_strategy=zero, fsdp_unit_modules=units, **options
        )

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.sharded)

    def data(self, seed: int, *shape: int) -> list[Tensor]:
        """One input per rank, the same list on every rank."""
        return [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))
            for rank in range(self.world_size)
        ]

    def backward(self, loss: Loss, inputs: list[Tensor]) -> None:
        """Backward of both on `inputs`, one per rank."""
        for value in inputs:
            (loss(self.plain, value) / self.world_size).backward()
        loss(self.sharded, inputs[self.rank]).backward()

    def step(self) -> None:
        for param in self.plain.parameters():
            # A plain optimizer skips what has no gradient; sharded, an absent gradient counts as
            # zero.
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        self.plain_optimizer.step()
        self.optimizer.step()
        self.plain_optimizer.zero_grad()
        self.optimizer.zero_grad()

    def train(self, loss: Loss, shape: tuple[int, ...], steps: int = 3) -> None:
        for step in range(steps):
            self.backward(loss, self.data(step, *shape))
            self.check_grads()
            self.step()
        self.check_params()

    def check_grads(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Gradients equal the plain twin's, absent ones counting as zero; all units are at rest."""
        self.check_at_rest()
        named = dict(self.sharded.named_parameters())
        for name, param in self.plain.named_parameters():
            if not param.requires_grad:
                assert named[name].grad is None, name
                continue
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            grad = named[name].grad
            got = torch.zeros_like(param) if grad is None else grad.full_tensor()
            torch.testing.assert_close(
                got, expected, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )

    def check_params(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        named = dict(self.sharded.named_parameters())
        assert list(named) == [name for name, _ in self.plain.named_parameters()]
        for name, param in self.plain.named_parameters():
            torch.testing.assert_close(
                named[name].full_tensor(), param.detach(), rtol=rtol, atol=atol
            )

    def check_at_rest(self) -> None:
        for unit in self.runtime.units:
            assert unit.state is UnitState.SHARDED, unit.spec.name
        for name, param in self.sharded.named_parameters():
            assert isinstance(param, ss.ShardedTensor), name


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
