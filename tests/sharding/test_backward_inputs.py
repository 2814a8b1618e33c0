"""`backward(inputs=...)` and `torch.autograd.grad` with sharded parameters, as with plain ones."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# As user code does, long before a model is sharded.
from torch.autograd import backward, grad

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins

Backward = Callable[[Tensor, Sequence[Tensor]], None]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _by_method(loss: Tensor, inputs: Sequence[Tensor]) -> None:
    loss.backward(inputs=list(inputs))


def _by_function(loss: Tensor, inputs: Sequence[Tensor]) -> None:
    backward([loss], inputs=tuple(inputs))


def _named(rank: int, world_size: int, run: Backward) -> None:
    for zero in LEVELS[world_size]:
        for names in (["0.weight"], ["2.bias", "0.bias"], ["0.weight", "0.bias", "2.weight"]):
            twins = Twins(rank, world_size, _model(), zero, [nn.Linear])
            for step in range(2):
                for x in twins.data(step, 4, 6):
                    run(_loss(twins.plain, x) / world_size, _pick(twins.plain, names))
                x = twins.data(step, 4, 6)[rank].requires_grad_()
                run(_loss(twins.sharded, x), [*_pick(twins.sharded, names), x])
                assert x.grad is not None
                twins.check_grads()  # absent ones count as zero
            twins.step()
            twins.check_params()
            twins.train(_loss, (4, 6), steps=1)


def _pick(model: nn.Module, names: Sequence[str]) -> list[Tensor]:
    params = dict(model.named_parameters())
    return [params[name] for name in names]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("run", [_by_method, _by_function], ids=["method", "function"])
def test_backward_with_inputs_gives_the_named_parameters_their_gradients(
    run: Backward, world_size: int
) -> None:
    run_on_ranks(_named, world_size, run)


def _kept(rank: int, world_size: int) -> None:
    """What is not named keeps the gradient that it has."""
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, _model(), zero, [nn.Linear])
        twins.backward(_loss, twins.data(0, 4, 6))
        for x in twins.data(1, 4, 6):
            backward(_loss(twins.plain, x) / world_size, inputs=[twins.plain[2].weight])
        mine = twins.data(1, 4, 6)[rank]
        backward(_loss(twins.sharded, mine), inputs=[twins.sharded[2].weight])
        twins.check_grads()


@pytest.mark.parametrize("world_size", [1, 2])
def test_backward_with_inputs_leaves_other_gradients_as_they_are(world_size: int) -> None:
    run_on_ranks(_kept, world_size)


def _own_gradients(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, _model(), zero, [nn.Linear])
        x = twins.data(0, 4, 6)[rank]
        loss, plain_loss = _loss(twins.sharded, x), _loss(twins.plain, x)
        names = ["2.weight", "0.bias"]
        got = grad(loss, _pick(twins.sharded, names), retain_graph=True)
        expected = grad(plain_loss, _pick(twins.plain, names))
        for one, other in zip(got, expected, strict=True):
            assert type(one) is Tensor
            torch.testing.assert_close(one, other)
        # As VQGAN weighs two losses by the slopes at the last layer, and then trains on both.
        (loss * float(got[0].norm())).backward()
        for value in twins.data(0, 4, 6):
            plain_loss = _loss(twins.plain, value) / world_size
            (slope,) = grad(plain_loss * world_size, twins.plain[2].weight, retain_graph=True)
            (plain_loss * float(slope.norm())).backward()
        twins.check_grads()
        twins.step()
        twins.check_params()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_grad_of_sharded_parameters_is_the_rank_s_own_whole_gradient(world_size: int) -> None:
    run_on_ranks(_own_gradients, world_size)


def _unused(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = _model()
        ss.fully_shard(model, zero_dp_strategy=zero, fsdp_unit_modules=[nn.Linear])
        x = torch.ones(2, 6)
        first, second = grad(
            model[0](x).sum(), [model[0].weight, model[2].weight], allow_unused=True
        )
        assert first.shape == (8, 6) and second is None
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            grad(model[0](x).sum(), model[2].weight)
        model[2].requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            grad(model(x).sum(), model[2].weight)


@pytest.mark.parametrize("world_size", [1, 2])
def test_grad_says_what_the_graph_does_not_reach(world_size: int) -> None:
    run_on_ranks(_unused, world_size)


def test_results_of_operators_are_refused_as_inputs_by_name() -> None:
    model = _model()
    ss.fully_shard(model)
    loss = _loss(model, torch.ones(2, 6))
    with pytest.raises(RuntimeError, match=r"'0.weight'.*no gradient reaches"):
        loss.backward(inputs=[model[0].weight.exp()])
    with pytest.raises(RuntimeError, match=r"'0.weight'.*no gradient reaches"):
        grad(loss, model[0].weight.exp())


def test_grad_of_a_result_of_operators_is_sharded_as_it_is() -> None:
    model = _model()
    ss.fully_shard(model)
    weight = model[0].weight
    result = weight.exp()
    (slope,) = grad(result, weight, torch.ones_like(result))
    assert torch.equal(slope.full_tensor(), result.detach().full_tensor())


def _higher_order(rank: int, world_size: int) -> None:
    """A penalty on the slope at a parameter: the graph of the first gradient is differentiated."""

    def loss(model: Any, x: Tensor) -> Tensor:
        (slope,) = grad(_loss(model, x), model[2].weight, create_graph=True)
        return slope.square().sum()

    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, _model(), zero, [nn.Linear])
        twins.backward(loss, twins.data(0, 4, 6))
        twins.check_grads()


@pytest.mark.parametrize("world_size", [1, 2])
def test_slope_at_a_sharded_parameter_can_be_differentiated(world_size: int) -> None:
    run_on_ranks(_higher_order, world_size)


def test_plain_callers_are_untouched() -> None:
    ss.fully_shard(_model())
    x = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    slope.sum().backward(inputs=[x])
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    compiled = torch.compile(lambda value: value.sin() * 2, backend="aot_eager")
    y = torch.ones(3, requires_grad=True)
    compiled(y).sum().backward()
    assert torch.allclose(y.grad, 2 * torch.ones(3).cos())
    batched = torch.autograd.functional.jacobian(lambda v: v.square(), x.detach(), vectorize=True)
    assert torch.equal(batched, 2 * torch.eye(3))
