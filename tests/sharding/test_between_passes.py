"""What people do to a model between forward and backward, between accumulated backwards, and after
a backward that failed: it lasts, as on a plain model, or it is refused.
"""

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins, square_loss

SHAPE = (4, 6)
BF16_COMPUTE = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Layer(nn.Linear):
    """A unit, whose backward fails while `fails` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(super().forward(x))
        if self.fails:
            x.register_hook(_fail)
        return x


def _fail(_grad: Tensor) -> Tensor:
    raise ArithmeticError("in backward")


def make_twins(rank: int, world_size: int, zero: int, **options: ss.MixedPrecisionPolicy) -> Twins:
    model = nn.Sequential(Layer(6, 6), Layer(6, 6), Layer(6, 6), nn.Linear(6, 2))
    return Twins(rank, world_size, model, zero, [Layer], **options)


def frozen_between_forward_and_backward(rank: int, world_size: int, zero: int) -> None:
    twins = make_twins(rank, world_size, zero)
    for step, trains in enumerate((True, False, False, True, True)):
        if trains:
            for model in (twins.plain, twins.sharded):
                model.requires_grad_(True)
        losses = []
        for model, inputs in (
            (twins.plain, twins.data(step, *SHAPE)),
            (twins.sharded, [twins.data(step, *SHAPE)[rank]]),
        ):
            losses.append(sum(square_loss(model, value) for value in inputs) / len(inputs))
            model[0].requires_grad_(trains)
            model[3].requires_grad_(trains)
        for loss in losses:
            loss.backward()
        for plain, sharded in zip(
            twins.plain.parameters(), twins.sharded.parameters(), strict=True
        ):
            assert plain.requires_grad == sharded.requires_grad
            assert plain.requires_grad or sharded.grad is None
        twins.step()
        twins.check_params()


def written_after_a_forward(rank: int, world_size: int, zero: int) -> None:
    for policy in (ss.MixedPrecisionPolicy(), BF16_COMPUTE):
        twins = make_twins(rank, world_size, zero, mixed_precision_policy=policy)
        for model in (twins.plain, twins.sharded):
            model(torch.ones(SHAPE))
            with torch.no_grad():
                model[3].weight.zero_()
                model[0].weight.mul_(2.0)
                model[1].bias.data.add_(1.0)
        assert all(isinstance(p, ss.ShardedTensor) for p in twins.sharded.parameters())
        twins.check_params()
        x = twins.data(1, *SHAPE)[rank]
        tolerance = 0 if policy.param_dtype is None else 2**-5
        with torch.no_grad():
            torch.testing.assert_close(
                twins.sharded(x).float(), twins.plain(x), rtol=tolerance, atol=tolerance + 1e-6
            )


def failed_backward(twins: Twins, index: int) -> None:
    twins.sharded[index].fails = True
    with pytest.raises(ArithmeticError):
        square_loss(twins.sharded, twins.data(9, *SHAPE)[twins.rank]).backward()
    twins.sharded[index].fails = False
    twins.optimizer.zero_grad()


def after_a_failed_backward(rank: int, world_size: int, zero: int) -> None:
    """The root's forward is not what comes next."""

    def parts_alone(model: nn.Module, x: Tensor) -> Tensor:
        return model[2](model[1](x)).square().mean()

    twins = make_twins(rank, world_size, zero)
    twins.train(square_loss, SHAPE, steps=1)
    failed_backward(twins, 1)
    twins.train(parts_alone, SHAPE, steps=2)
    loss = square_loss(twins.sharded, twins.data(4, *SHAPE)[rank])
    # Its own forward is past, and what comes next is a backward.
    twins.sharded[1].fails = True
    failed_loss = square_loss(twins.sharded, twins.data(9, *SHAPE)[rank])
    twins.sharded[1].fails = False
    with pytest.raises(ArithmeticError):
        failed_loss.backward()
    loss.backward()
    for value in twins.data(4, *SHAPE):
        (square_loss(twins.plain, value) / world_size).backward()
    twins.check_grads()
    twins.step()
    twins.train(square_loss, SHAPE)


def accumulated_gradients_changed_in_place(rank: int, world_size: int, zero: int) -> None:
    twins = make_twins(rank, world_size, zero)
    for edit in ("optimizer", "module", "scaled", "one of them", "after an exchange"):
        if edit == "after an exchange":
            square_loss(twins.sharded, twins.data(0, *SHAPE)[rank]).backward()
        with ss.no_sync(twins.sharded):
            square_loss(twins.sharded, twins.data(1, *SHAPE)[rank]).backward()
        with pytest.raises(RuntimeError, match=r"accumulated under no_sync.*set_to_none=True"):
            if edit == "module":
                twins.sharded.zero_grad(set_to_none=False)
            elif edit == "scaled":
                for param in twins.sharded.parameters():
                    param.grad.mul_(0.5)
            elif edit == "one of them":
                twins.sharded[0].bias.grad = torch.zeros(6)
                twins.sharded[0].weight.grad.zero_()
            else:  # over flat gradients: noticed when the next ones come
                twins.optimizer.zero_grad(set_to_none=False)
                square_loss(twins.sharded, twins.data(2, *SHAPE)[rank]).backward()
        twins.optimizer.zero_grad()
        twins.train(square_loss, SHAPE, steps=1)
    # Cleared to zero while nothing is accumulated, one gradient replaced: both are fine.
    twins.backward(square_loss, twins.data(1, *SHAPE))
    for optimizer in (twins.optimizer, twins.plain_optimizer):
        optimizer.zero_grad(set_to_none=False)
    with ss.no_sync(twins.sharded):
        twins.backward(square_loss, twins.data(3, *SHAPE))
    for model in (twins.plain, twins.sharded):
        model[0].weight.grad = torch.full((6, 6), 0.25)
    twins.backward(square_loss, twins.data(2, *SHAPE))
    twins.check_grads()


def run_case(rank: int, world_size: int, name: str) -> None:
    for zero in range(4):
        torch.manual_seed(0)
        globals()[name](rank, world_size, zero)


CASES = [
    frozen_between_forward_and_backward,
    written_after_a_forward,
    after_a_failed_backward,
    accumulated_gradients_changed_in_place,
]


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_equals_a_plain_model(case: str) -> None:
    run_on_ranks(run_case, 2, case)
