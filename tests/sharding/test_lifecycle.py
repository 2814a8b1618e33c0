"""Forward and backward in all the ways people write them: each equals a plain model at every ZeRO
level.
"""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.sharding.trace import Kind
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins, square_loss

ZERO = range(4)


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((), 0.75))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def stack(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(count)), nn.Linear(6, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.layer = Layer()
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x.abs().mul(3).long().clamp(max=7))))


def tied_weights(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, Tied(), zero, [Layer, nn.Embedding, nn.Linear])
    twins.train(square_loss, (4, 5), steps=2)
    model = twins.sharded
    assert model.head.weight is model.embedding.weight
    numel = sum(
        unit.spec.layout.segments[i].numel
        for unit in twins.runtime.units
        for i in range(len(unit.faces.full))
    )
    assert numel == 8 * 6 + 6 * 6 + 6 + 1


class CallsHeadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.head = Layer(), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(x)
        self.auxiliary = self.head(self.norm(hidden))
        return self.head(hidden)


def unit_used_twice(rank: int, world_size: int, zero: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + model.auxiliary.abs().mean()

    Twins(rank, world_size, CallsHeadTwice(), zero, [Layer, nn.Linear]).train(loss, (4, 6))


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, 2) / 3)
        self.b = nn.Parameter(torch.randn(2, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.a @ self.b)


class AdapterStack(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(4))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def adapters_on_a_frozen_base(rank: int, world_size: int, zero: int) -> None:
    for recompute in (False, True):
        torch.manual_seed(1)
        twins = Twins(rank, world_size, AdapterStack(recompute), zero, [Adapter])
        frozen = twins.sharded.layers[2].base.weight.full_tensor().clone()
        twins.train(square_loss, (3, 8))
        assert torch.equal(twins.sharded.layers[2].base.weight.full_tensor(), frozen)
        for layer in twins.sharded.layers:
            assert layer.base.weight.grad is None


def frozen_units_are_released(rank: int, world_size: int, zero: int) -> None:
    model = stack(4)
    model[1].requires_grad_(False)
    model[2].requires_grad_(False)
    twins = Twins(rank, world_size, model, zero, [Layer])
    twins.train(square_loss, (4, 6), steps=2)
    resident = twins.runtime.pool.live_bytes
    twins.runtime.trace.steps = []
    twins.train(square_loss, (4, 6), steps=2)
    kinds = [kind for kind, _ in twins.runtime.trace.steps]
    if zero == 3:
        assert kinds.count(Kind.GATHER) == kinds.count(Kind.RELEASE)
        # The first block's unit is needed long after: frozen blocks must not stay gathered until
        # then.
        steps = twins.runtime.trace.steps
        last = max(i for i, step in enumerate(steps) if step == (Kind.BACKWARD, 1))
        assert (Kind.RELEASE, 2) in steps[last - 6 : last] or (Kind.RELEASE, 3) in steps[
            last - 6 : last
        ]
    assert twins.runtime.pool.live_bytes == resident


class SkipsUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skip = Layer(), Layer(), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.skip else self.second(x)


def unit_without_gradient(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, SkipsUnit(), zero, [Layer])
    twins.train(square_loss, (4, 6), steps=2)
    twins.plain.skip = twins.sharded.skip = False
    twins.train(square_loss, (4, 6), steps=2)


def unit_used_in_one_microbatch(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, SkipsUnit(), zero, [Layer])
    for skip_first in (False, True):
        twins.plain.skip = twins.sharded.skip = skip_first
        with ss.no_sync(twins.sharded):
            twins.backward(square_loss, twins.data(1, 4, 6))
        twins.plain.skip = twins.sharded.skip = not skip_first
        twins.backward(square_loss, twins.data(2, 4, 6))
        twins.check_grads()
        twins.step()
    twins.check_params()


ODD_SHAPES = ((), (1,), (1, 1), (2,), (1, 6), (6, 1), (3, 2, 1), (0, 6))


class OddShapes(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.rand(shape) + 0.5) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x * value.sum() if value.numel() else x + value.sum()
        return x


def odd_shapes(rank: int, world_size: int, zero: int) -> None:
    nothing = OddShapes((0, 6), (0,))
    model = nn.Sequential(OddShapes(*ODD_SHAPES), nothing, Layer())
    Twins(rank, world_size, model, zero, [OddShapes, Layer]).train(square_loss, (2, 6))


def backward_twice_through_one_graph(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, stack(), zero, [Layer])
    inputs = twins.data(3, 4, 6)
    for model, values in ((twins.plain, inputs), (twins.sharded, [inputs[rank]])):
        outputs = [model(value) for value in values]
        (sum(output.square().mean() for output in outputs) / len(values)).backward(
            retain_graph=True
        )
        model.zero_grad()
        (sum(output.abs().mean() for output in outputs) / len(values)).backward()
    twins.check_grads()


def several_forwards_before_backward(rank: int, world_size: int, zero: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + model(x.flip(0) + 1).abs().mean()

    Twins(rank, world_size, stack(), zero, [Layer]).train(loss, (4, 6))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x * 1.0


def activation_checkpointing(rank: int, world_size: int, zero: int) -> None:
    for reentrant in (False, True):
        twins = Twins(rank, world_size, Checkpointed(reentrant), zero, [Layer])
        twins.train(square_loss, (4, 6))


@dataclasses.dataclass
class Output:
    value: Tensor
    count: int = 3
    nothing: Tensor | None = None


Pair = namedtuple("Pair", ["first", "second"])


class Wrapper(nn.Module):
    """Passes its tensor on inside containers, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = Layer(), kind

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        return {
            "dataclass": lambda: Output(x),
            "namedtuple": lambda: Pair(x, x * 2),
            "nested": lambda: {"a": [x, None], "b": (x + 1,)},
            "ordered dict": lambda: OrderedDict(a=x, b=None),
        }[self.kind]()


def unwrap(value: Any) -> Tensor:
    if isinstance(value, Output):
        return value.value
    if isinstance(value, Pair):
        return value.first + value.second
    if isinstance(value, dict):
        first = value["a"]
        return first[0] + value["b"][0] if isinstance(first, list) else first
    return value


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = ["dataclass", "namedtuple", "nested", "ordered dict"]
        self.layers = nn.ModuleList(Wrapper(kind) for kind in kinds)

    def forward(self, x: Tensor) -> Output:
        for layer in self.layers:
            x = unwrap(layer(x))
        return Output(x)


def outputs_in_containers(rank: int, world_size: int, zero: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).value.square().mean()

    Twins(rank, world_size, Containers(), zero, [Wrapper]).train(loss, (4, 6))


class ReturnsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unsqueeze(1)).squeeze(1)


class ChangesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ReturnsView(), nn.Linear(6, 6), ReturnsView()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            kept = x
            x = layer(x)
            x += kept
            x.mul_(0.5)
        return x


def outputs_changed_in_place(rank: int, world_size: int, zero: int) -> None:
    model = ChangesInPlace()
    Twins(rank, world_size, model, zero, [ReturnsView, nn.Linear]).train(square_loss, (4, 6))


def no_grad_and_inference_between_steps(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, stack(), zero, [Layer])
    x = twins.data(9, 4, 6)[rank]
    for step in range(3):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(twins.sharded(x), twins.plain(x), rtol=1e-5, atol=1e-6)
            twins.check_at_rest()
        twins.backward(square_loss, twins.data(step, 4, 6))
        twins.step()
    # A forward with grad that no backward follows, and then a step, must not leave stale weights.
    twins.sharded(x)
    twins.train(square_loss, (4, 6))


def where_no_sync_stands(rank: int, world_size: int, zero: int) -> None:
    for around in ("forward", "backward", "both"):
        twins = Twins(rank, world_size, stack(), zero, [Layer])
        first, second = twins.data(1, 4, 6), twins.data(2, 4, 6)
        for value in first + second:
            (square_loss(twins.plain, value) / world_size).backward()
        before = twins.runtime.collectives.traffic.calls["exchange"]
        if around == "forward":
            with ss.no_sync(twins.sharded):
                loss = square_loss(twins.sharded, first[rank])
            loss.backward()
        elif around == "backward":
            loss = square_loss(twins.sharded, first[rank])
            with ss.no_sync(twins.sharded):
                loss.backward()
        else:
            with pytest.raises(KeyError), ss.no_sync(twins.sharded):
                square_loss(twins.sharded, first[rank]).backward()
                raise KeyError
        exchanged = twins.runtime.collectives.traffic.calls["exchange"] - before
        assert exchanged == (4 if around == "forward" else 0)
        square_loss(twins.sharded, second[rank]).backward()
        assert twins.runtime.collectives.traffic.calls["exchange"] == before + exchanged + 4
        twins.check_grads()


def gradients_add_up_until_cleared(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, stack(), zero, [Layer])
    for clear in ("none", "optimizer", "module", "to zero", "no_sync"):
        for seed in (1, 2):
            twins.backward(square_loss, twins.data(seed, 4, 6))
        twins.check_grads()
        if clear == "optimizer":
            twins.optimizer.zero_grad()
        elif clear == "module":
            twins.sharded.zero_grad()
        elif clear == "to zero":
            twins.optimizer.zero_grad(set_to_none=False)
        elif clear == "no_sync":
            with ss.no_sync(twins.sharded):
                square_loss(twins.sharded, twins.data(5, 4, 6)[rank]).backward()
            twins.optimizer.zero_grad()
        if clear != "none":
            twins.plain_optimizer.zero_grad()
    twins.backward(square_loss, twins.data(7, 4, 6))
    twins.check_grads()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.where == "forward":
            raise ArithmeticError(self.where)
        if self.where == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, _grad: Tensor) -> None:
        raise ArithmeticError("backward")


def exception_in_a_step(rank: int, world_size: int, zero: int) -> None:
    for where in ("forward", "backward"):
        for accumulating in (False, True):
            model = nn.Sequential(Layer(), Fails(), Layer(), nn.Linear(6, 2))
            twins = Twins(rank, world_size, model, zero, [Layer])
            twins.backward(square_loss, twins.data(0, 4, 6))
            twins.step()
            if accumulating:
                with ss.no_sync(twins.sharded):
                    square_loss(twins.sharded, twins.data(8, 4, 6)[rank]).backward()
            twins.sharded[1].where = where
            with pytest.raises(ArithmeticError):
                square_loss(twins.sharded, twins.data(9, 4, 6)[rank]).backward()
            twins.sharded[1].where = ""
            twins.optimizer.zero_grad()
            twins.train(square_loss, (4, 6), steps=2)


def step_after_a_failed_forward(rank: int, world_size: int, zero: int) -> None:
    model = nn.Sequential(Layer(), Fails(), Layer(), nn.Linear(6, 2))
    twins = Twins(rank, world_size, model, zero, [Layer])
    twins.backward(square_loss, twins.data(0, 4, 6))
    twins.sharded[1].where = "forward"
    with pytest.raises(ArithmeticError):
        twins.sharded(twins.data(9, 4, 6)[rank])
    twins.sharded[1].where = ""
    twins.step()
    twins.train(square_loss, (4, 6), steps=2)


def clearing_one_gradient_clears_its_sum(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, stack(), zero, [Layer])
    with ss.no_sync(twins.sharded):
        twins.backward(square_loss, twins.data(1, 4, 6))
    for model in (twins.plain, twins.sharded):
        model[0].linear.weight.grad = None
    twins.backward(square_loss, twins.data(2, 4, 6))
    twins.check_grads()


def edits_outside_the_step(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, stack(), zero, [Layer])
    twins.train(square_loss, (4, 6), steps=1)
    for model in (twins.plain, twins.sharded):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
                param.data.add_(0.125)
    twins.backward(square_loss, twins.data(5, 4, 6))
    for model in (twins.plain, twins.sharded):
        for param in model.parameters():
            param.grad.mul_(0.25)
            param.grad = param.grad + 0.01 * param.detach()
    twins.check_grads()
    twins.step()
    twins.check_params()
    twins.train(square_loss, (4, 6))


def loads_a_plain_state_dict(rank: int, world_size: int, zero: int) -> None:
    twins = Twins(rank, world_size, nn.Sequential(stack(), nn.BatchNorm1d(2)), zero, [Layer])
    twins.backward(square_loss, twins.data(0, 4, 6))
    twins.step()
    torch.manual_seed(77)
    other = nn.Sequential(stack(), nn.BatchNorm1d(2))
    twins.plain.load_state_dict(other.state_dict())
    twins.sharded.load_state_dict(other.state_dict())
    twins.check_params()
    assert list(twins.sharded.state_dict()) == list(other.state_dict())
    twins.sharded.eval(), twins.plain.eval()
    twins.train(square_loss, (4, 6), steps=1)


def unit_called_by_itself(rank: int, world_size: int, zero: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model[1](model[0](x)).square().mean()

    twins = Twins(rank, world_size, stack(), zero, [Layer])
    twins.train(loss, (4, 6), steps=2)
    twins.train(square_loss, (4, 6), steps=2)


def another_order_than_before(rank: int, world_size: int, zero: int) -> None:
    def forwards(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def backwards(model: nn.Module, x: Tensor) -> Tensor:
        for layer in (model[2], model[0], model[1]):
            x = layer(x)
        return x.square().mean()

    twins = Twins(rank, world_size, stack(), zero, [Layer])
    for loss in (forwards, backwards, forwards, backwards):
        twins.train(loss, (4, 6), steps=1)


def several_dtypes_in_a_unit(rank: int, world_size: int, zero: int) -> None:
    class Mixed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.randn(6, 6).bfloat16())
            self.counts = nn.Parameter(torch.arange(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.low.float()

    model = nn.Sequential(Mixed(), nn.Linear(6, 2))
    policy = ss.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)
    twins = Twins(rank, world_size, model, zero, [Mixed], mixed_precision_policy=policy)
    for step in range(2):
        twins.backward(square_loss, twins.data(step, 4, 6))
        named = dict(twins.sharded.named_parameters())
        for name, param in twins.plain.named_parameters():
            if param.grad is not None:
                tolerance = 2**-6 if param.dtype == torch.bfloat16 else 1e-2
                torch.testing.assert_close(
                    named[name].grad.full_tensor(), param.grad, rtol=tolerance, atol=1e-3
                )
        twins.step()


def run_case(rank: int, world_size: int, name: str) -> None:
    for zero in ZERO:
        torch.manual_seed(0)
        globals()[name](rank, world_size, zero)


CASES = [
    tied_weights,
    unit_used_twice,
    adapters_on_a_frozen_base,
    frozen_units_are_released,
    unit_without_gradient,
    unit_used_in_one_microbatch,
    odd_shapes,
    backward_twice_through_one_graph,
    several_forwards_before_backward,
    activation_checkpointing,
    outputs_in_containers,
    outputs_changed_in_place,
    no_grad_and_inference_between_steps,
    where_no_sync_stands,
    gradients_add_up_until_cleared,
    exception_in_a_step,
    step_after_a_failed_forward,
    clearing_one_gradient_clears_its_sum,
    edits_outside_the_step,
    loads_a_plain_state_dict,
    unit_called_by_itself,
    another_order_than_before,
    several_dtypes_in_a_unit,
]


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_equals_a_plain_model(case: str) -> None:
    run_on_ranks(run_case, 2, case)


@pytest.mark.parametrize("world_size", [1, 4])
def test_odd_shapes_at_other_world_sizes(world_size: int) -> None:
    run_on_ranks(run_case, world_size, "odd_shapes")
