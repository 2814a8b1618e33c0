"""Steps with gradients that are NaN or infinite: refused or left out, alike on all ranks."""

import contextlib
import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import WORLD, options_of
from sidestream.tests.sharding.twins import LEVELS

BF16 = torch.bfloat16
VALUES = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"grad_comm_dtype": BF16},
    **{name: {"grad_wire": name} for name in ("fp8", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")},
    "nvfp4 rotated": {"grad_wire": ss.MessageWire("nvfp4", hadamard=True)},
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "ours": lambda params: ss.AdamW(params, lr=0.1),
}


class Adds(torch.autograd.Function):
    """Adds `value` to one element of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.view(-1)[-1] += ctx.value
        return grad, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, 17) / 4)
        self.bias = nn.Parameter(torch.randn(17))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.added = 0.0

    def forward(self, x: Tensor) -> Tensor:
        weight = Adds.apply(self.weight, self.added) if self.added else self.weight
        return torch.tanh(x @ weight.T + self.bias) + self.empty.sum()


class Training:
    """Of one rank; `backward` may add to an element of its gradient of '1.weight'."""

    def __init__(self, zero: int, make: Any, policy: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Layer(), Layer(), Layer())
        self.optimizer = make(self.model.parameters())
        dtypes = options.pop("dtypes", {})
        ss.fully_shard(
            self.model,
            self.optimizer,
            zero_dp_strategy=zero,
            fsdp_unit_modules=[Layer],
            mixed_precision_policy=ss.MixedPrecisionPolicy(nonfinite_grads=policy, **dtypes),
            **options,
        )

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(4, 17, generator=torch.Generator().manual_seed(seed))
        return self.model(x).square().mean()

    def backward(self, seed: int, added: float = 0.0) -> None:
        self.model[1].added = added
        self.loss(seed).backward()
        self.model[1].added = 0.0

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        """Parameters and what the optimizer keeps of them."""
        found = [param.to_local().detach().clone() for param in self.model.parameters()]
        for state in self.optimizer.state.values():
            for value in state.values():
                found.append(getattr(value, "local", value).clone())
        return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def poisoned(
    rank: int,
    world_size: int,
    make: str,
    levels: tuple[int, ...],
    wires: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    """One rank's gradient has a bad element in the second of three steps."""
    bad = world_size - 1
    for zero in levels:
        for wire, (value, added) in zip(wires, itertools.cycle(VALUES.items()), strict=False):
            dtypes = WIRES[wire]
            case = f"zero{zero}, {value}, {wire}"
            raising, skipping, clean = (
                Training(zero, OPTIMIZERS[make], policy, dtypes=dtypes, **options)
                for policy in ("raise", "skip", "keep")
            )
            for training in (raising, skipping):
                training.step(0)
                before = training.values()
                training.backward(1, added if rank == bad else 0.0)
                if training is raising:
                    text = (
                        "step after 1 others: expected finite gradients, got NaN or infinity in "
                        f"'1.weight' on rank {bad}; "
                    )
                    with pytest.raises(ss.NonFiniteGradientError, match=re.escape(text)) as caught:
                        training.optimizer.step()
                    assert (caught.value.ranks, caught.value.step) == ({"1.weight": (bad,)}, 1)
                else:
                    assert training.optimizer.step() is None
                assert same(training.values(), before), case
                assert training.model[1].weight.grad is not None
                training.optimizer.zero_grad()
                training.step(2)
                training.step(3)
            clean.step(0)
            clean.backward(1)  # the noise of exchanges goes by their number
            clean.optimizer.zero_grad()
            clean.step(2)
            clean.step(3)
            assert same(raising.values(), clean.values()), case
            assert same(skipping.values(), clean.values()), case
            counts = [ss.skipped_steps(t.model) for t in (raising, skipping, clean)]
            assert counts == [0, 1, 0], case


@pytest.mark.parametrize(("world_size", "make"), [(1, "SGD"), (2, "ours"), (3, "SGD")])
def test_one_bad_element_stops_the_step_on_all_ranks(world_size: int, make: str) -> None:
    run_on_ranks(poisoned, world_size, make, LEVELS[world_size], ("fp32", "bf16"), {})


def test_where_ranks_may_differ() -> None:
    run_on_ranks(poisoned, 2, "SGD", (3,), ("mxfp8",), {"ranks_may_differ": True})


@pytest.mark.parametrize("zero", [0, 3])
def test_whatever_gradients_travel_in(zero: int) -> None:
    run_on_ranks(poisoned, 2, "SGD", (zero,), tuple(WIRES)[2:], {})


def poisoned_on_meshes(rank: int, world_size: int) -> None:
    for mesh in ("HSDP", "HFSDP", "two nodes"):
        training = Training(1, OPTIMIZERS["SGD"], "raise", **options_of(mesh))
        training.step(0)
        training.backward(1, math.nan if rank == 2 else 0.0)
        with pytest.raises(ss.NonFiniteGradientError, match=r"in '1\.weight' on rank 2;"):
            training.optimizer.step()


def test_on_meshes() -> None:
    run_on_ranks(poisoned_on_meshes, WORLD)


def accumulated(rank: int, world_size: int, zero: int) -> None:
    """The first of three microbatches is bad on the first rank, the last on the last."""
    training = Training(zero, OPTIMIZERS["SGD"], "raise")
    for where in (0, 2):
        for microbatch in range(3):
            is_bad = rank == (0 if where == 0 else world_size - 1) and microbatch == where
            with ss.no_sync(training.model) if microbatch < 2 else contextlib.nullcontext():
                training.backward(microbatch, math.inf if is_bad else 0.0)
        whose = 0 if where == 0 else world_size - 1
        with pytest.raises(ss.NonFiniteGradientError, match=rf"in '1\.weight' on rank {whose};"):
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(5)


@pytest.mark.parametrize("zero", [0, 3])
def test_bad_microbatches(zero: int) -> None:
    run_on_ranks(accumulated, 2, zero)


def overflowing(rank: int, world_size: int) -> None:
    """Finite on each rank: too large for the wire, or for the sum; then changed by hand."""
    half = {"grad_comm_dtype": torch.float16}
    for dtypes, added in ((half, 1e5), ({}, 3e38)):
        training = Training(2, OPTIMIZERS["SGD"], "raise", dtypes=dtypes)
        training.backward(0, added)
        text = "in the sum of '1.weight', though each rank's own gradient was finite"
        with pytest.raises(ss.NonFiniteGradientError, match=re.escape(text)) as caught:
            training.optimizer.step()
        assert caught.value.ranks == {"1.weight": ()}
    # What was noted of a gradient goes with it, also where others of the unit stay.
    training.optimizer.zero_grad()
    training.backward(0, math.nan)
    training.model[1].weight.grad = None
    training.backward(0)
    training.optimizer.step()
    training.model[1].weight.grad.fill_(math.nan)
    with pytest.raises(ss.NonFiniteGradientError, match=re.escape(text)):
        training.optimizer.step()


def zeroed(rank: int, world_size: int) -> None:
    """Gradients that are zeroed in place are no rank's any more."""
    training = Training(3, OPTIMIZERS["SGD"], "raise")
    for bad in (0, 1):
        training.backward(0, math.nan if rank == bad else 0.0)
        with pytest.raises(ss.NonFiniteGradientError) as caught:
            training.optimizer.step()
        assert caught.value.ranks == {"1.weight": (bad,)}
        training.optimizer.zero_grad(set_to_none=False)


def test_gradients_that_are_zeroed_in_place_are_forgotten() -> None:
    run_on_ranks(zeroed, 2)


def recovering(rank: int, world_size: int, wire: str) -> None:
    """Blocks that a tensor fills in part have NaN behind it, where no load writes."""
    for zero in LEVELS[world_size]:
        dtypes = {"grad_wire": wire, "param_wire": "mxfp8"}
        training = Training(zero, OPTIMIZERS["ours"], "keep", dtypes=dtypes)
        state = {name: value.clone() for name, value in ss.full_state_dict(training.model).items()}
        training.backward(0, math.nan if rank else math.inf)
        training.model[1].weight.grad = None
        training.backward(1)
        assert ss.clip_grad_norm_(training.model, 1.0).isfinite()
        training.step(2)
        training.backward(3, math.nan)
        training.optimizer.step()
        training.model.load_state_dict(state)
        training.optimizer.state.clear()
        training.optimizer.zero_grad()
        assert training.loss(4).isfinite()
        training.step(5)
        assert all(value.isfinite().all() for value in training.values())


@pytest.mark.parametrize("wire", ["fp8", "mxfp8", "nvfp4"])
def test_training_goes_on_when_weights_are_loaded_again(wire: str) -> None:
    run_on_ranks(recovering, 2, wire)


def test_overflow_is_told_from_a_bad_gradient() -> None:
    run_on_ranks(overflowing, 2)


def two_optimizers(rank: int, world_size: int) -> None:
    """Each decides about its own; a frozen parameter has none."""
    model = nn.Sequential(Layer(), Layer(), Layer())
    model[0].requires_grad_(False)
    policy = ss.MixedPrecisionPolicy(nonfinite_grads="skip")
    ss.fully_shard(model, fsdp_unit_modules=[Layer], mixed_precision_policy=policy)
    first, second = (
        ss.fully_shard_optimizer(torch.optim.SGD(model[i].parameters(), lr=0.1)) for i in (1, 2)
    )
    before = [model[i].weight.full_tensor() for i in (1, 2)]
    model[1].added = math.nan if rank else 0.0
    model(torch.ones(2, 17)).sum().backward()
    first.step()
    second.step()
    assert torch.equal(model[1].weight.full_tensor(), before[0])
    assert not torch.equal(model[2].weight.full_tensor(), before[1])
    assert ss.skipped_steps(model) == 1


def test_two_optimizers_on_one_model() -> None:
    run_on_ranks(two_optimizers, 2)


class Twice(torch.optim.SGD):
    """Calls its closure again when it has stepped."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return closure()


def closures(rank: int, world_size: int) -> None:
    training = Training(3, lambda params: Twice(params, lr=0.1), "skip", elementwise=True)
    added: list[float] = []

    def closure() -> Tensor:
        training.optimizer.zero_grad()
        training.model[1].added = added.pop(0) if rank else added.pop(0) and 0.0
        loss = training.loss(0)
        loss.backward()
        return loss

    with torch.enable_grad():
        before = training.values()
        added += [math.nan]
        loss = training.optimizer.step(closure)
        assert isinstance(loss, Tensor), "as a step that was made"
        assert same(training.values(), before)
        added += [0.0, math.nan]
        with pytest.raises(ss.NonFiniteGradientError) as caught:
            training.optimizer.step(closure)
        assert "closure was called again" in caught.value.__notes__[0]
        assert not same(training.values(), before)
    assert ss.skipped_steps(training.model) == 1


def test_a_closure_of_a_step_that_is_left_out() -> None:
    run_on_ranks(closures, 2)


def scaled(rank: int, world_size: int, policy: str, make: str) -> None:
    """A scaler leaves out what overflows, with no check of ours before or after it."""
    training = Training(3, OPTIMIZERS[make], policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        before = training.values()
        training.model[1].added = math.inf if rank and step == 1 else 0.0
        scaler.scale(training.loss(step)).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        assert same(training.values(), before) == (step == 1)
    assert scaler.get_scale() == 2.0
    assert ss.skipped_steps(training.model) == 0


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_beside_a_scaler(policy: str, make: str) -> None:
    run_on_ranks(scaled, 2, policy, make)


def test_a_step_called_through_the_class_is_checked_each_time() -> None:
    training = Training(3, OPTIMIZERS["SGD"], "skip")
    for _ in range(2):
        training.backward(0)
        torch.optim.SGD.step(training.optimizer)
        training.optimizer.zero_grad()
    before = training.values()
    training.backward(1, math.nan)
    with pytest.raises(ss.NonFiniteGradientError) as caught:
        torch.optim.SGD.step(training.optimizer)
    assert caught.value.step == 2
    training.optimizer.step()
    assert same(training.values(), before) and ss.skipped_steps(training.model) == 1


def calls(rank: int, world_size: int, policy: str) -> int:
    training = Training(3, OPTIMIZERS["SGD"], policy)
    training.step(0)
    traffic = runtime_of(training.model).collectives.traffic
    traffic.reset()
    training.step(0)
    return traffic.calls["all_reduce"]


def test_a_step_costs_one_small_message_and_by_default_none() -> None:
    assert run_on_ranks(calls, 2, "raise") == [1, 1]
    assert run_on_ranks(calls, 2, "keep") == [0, 0]


def test_a_warning_tells_of_it(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(3, OPTIMIZERS["SGD"], "skip")
    training.backward(0, math.nan)
    training.optimizer.step()
    (record,) = caplog.records
    assert "left out: step after 0 others: expected finite gradients" in record.message
    assert "'skip'" not in record.message


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite_grads: expected 'keep', 'raise' or 'skip'"):
        ss.MixedPrecisionPolicy(nonfinite_grads="ignore")
