"""Parameters frozen for a while, inputs that get gradients, units that a rank leaves out."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss

SHAPE = (4, 6)


class Layer(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Layer(), Layer())
        self.critic = nn.Sequential(Layer(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def train_generator(model: nn.Module, x: Tensor) -> Tensor:
    model.critic.requires_grad_(False)
    return square_loss(model, x)


def train_critic(model: nn.Module, x: Tensor) -> Tensor:
    model.critic.requires_grad_(True)
    return square_loss(model, x)


def check_all_grads(twins: Twins) -> None:
    """Those of frozen parameters too."""
    twins.check_at_rest()
    for (name, plain), sharded in zip(
        twins.plain.named_parameters(), twins.sharded.parameters(), strict=True
    ):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad
        got = torch.zeros_like(plain) if sharded.grad is None else sharded.grad.full_tensor()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=name)


def frozen_between_microbatches(rank: int, world_size: int, zero: int) -> None:
    for first_waits in (False, True):
        twins = Twins(rank, world_size, Gan(), zero, [Layer])
        for step in range(2):
            with ss.no_sync(twins.sharded) if first_waits else contextlib.nullcontext():
                twins.backward(train_critic, twins.data(step, *SHAPE))
            twins.backward(train_generator, twins.data(step + 10, *SHAPE))
            if not first_waits:
                check_all_grads(twins)
            twins.backward(train_critic, twins.data(step + 20, *SHAPE))
            check_all_grads(twins)
            twins.step()
            twins.check_params()


def stepped_while_frozen(rank: int, world_size: int, zero: int) -> None:
    """A plain optimizer steps what has a gradient, frozen or not."""
    twins = Twins(rank, world_size, Gan(), zero, [Layer])
    twins.backward(train_critic, twins.data(0, *SHAPE))
    twins.backward(train_generator, twins.data(1, *SHAPE))
    norms = [
        ss.clip_grad_norm_(twins.sharded, 0.1),
        nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1),
    ]
    torch.testing.assert_close(*norms)
    twins.step()
    twins.check_params()
    # Cleared while frozen, it stays clear.
    twins.backward(train_generator, twins.data(2, *SHAPE))
    assert all(param.grad is None for param in twins.sharded.critic.parameters())
    twins.optimizer.step()
    twins.plain_optimizer.step()
    twins.check_params()


def gradient_of_the_input(rank: int, world_size: int, zero: int) -> None:
    """FGSM between microbatches: all frozen, then on with training."""
    twins = Twins(rank, world_size, Gan(), zero, [Layer])
    for step in range(2):
        twins.backward(square_loss, twins.data(step, *SHAPE))
        attacks = []
        for model in (twins.plain, twins.sharded):
            model.requires_grad_(False)
            x = twins.data(9, *SHAPE)[rank].requires_grad_(True)
            square_loss(model, x).backward()
            model.requires_grad_(True)
            attacks.append(x.grad)
        torch.testing.assert_close(*attacks)
        twins.backward(square_loss, twins.data(step + 5, *SHAPE))
        check_all_grads(twins)
        twins.step()
        twins.check_params()


def leaf_input_beside_frozen(rank: int, world_size: int, zero: int) -> None:
    for frozen in ("generator", "critic"):
        model = Gan()
        getattr(model, frozen).requires_grad_(False)
        twins = Twins(rank, world_size, model, zero, [Layer])
        leaf = twins.data(3, *SHAPE)[rank].requires_grad_(True)
        for factor in (None, 2.0):
            x = leaf if factor is None else leaf * factor
            expected = torch.autograd.grad(square_loss(twins.plain, x), leaf, retain_graph=True)
            for _ in range(3):
                loss = square_loss(twins.sharded, x)
                got = torch.autograd.grad(loss, leaf, retain_graph=True)
                torch.testing.assert_close(got, expected)
                assert not leaf._backward_hooks
        twins.sharded.zero_grad()
        twins.optimizer.zero_grad()
        twins.backward(square_loss, twins.data(1, *SHAPE))
        twins.check_grads()


class Skipper(nn.Module):
    """Leaves a unit out on some ranks: where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 or x.sum() > 0:
                x = layer(x)
        return x


def unit_that_a_rank_skips(rank: int, world_size: int, zero: int) -> None:
    if zero == 3:
        return  # all ranks have to use all units there
    for overlap in (True, False):
        twins = Twins(
            rank, world_size, Skipper(), zero, [Layer], overlap_param_gather=overlap, prefetch=0
        )
        for step in range(3):
            inputs = twins.data(step, *SHAPE)
            for number, x in enumerate(inputs):
                inputs[number] = x - x.mean() + (1.0 if number % 2 else -1.0)
            twins.backward(square_loss, inputs)
            twins.check_grads()
            twins.step()
        twins.check_params()


def run_case(rank: int, world_size: int, name: str) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        globals()[name](rank, world_size, zero)


CASES = (
    frozen_between_microbatches,
    stepped_while_frozen,
    gradient_of_the_input,
    leaf_input_beside_frozen,
    unit_that_a_rank_skips,
)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_equals_a_plain_model(case: str, world_size: int) -> None:
    run_on_ranks(run_case, world_size, case)
