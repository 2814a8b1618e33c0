"""The definition of flat SGD: against NumPy bit for bit, against torch.optim.SGD in ulps.

One step from the same state differs from torch's, whose kernels contract products and sums, by at
most 2 ulps of the largest term: of the gradient with its decay 1, of the momentum 1 more; and the
parameter by 1 ulp of itself + 3 of the update.
"""

import numpy as np
import pytest
import torch

from sidestream.kernels.optim.op import flat_sgd_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.optim import cases as optim_cases

LR = 0.01
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "dampening": {"momentum": 0.9, "dampening": 0.2},
    "nesterov": {"momentum": 0.8, "nesterov": True, "maximize": True},
}


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def step_(shards, step, *, momentum=0.0, lr=LR, **options):
    has_momentum = momentum != 0.0
    flat_sgd_(
        shards.param,
        shards.grad,
        shards.first if has_momentum else None,
        number(lr),
        number(step, torch.int32) if has_momentum else None,
        momentum=momentum,
        compute=shards.compute,
        amax=shards.amax,
        **options,
    )


def naive_sgd(shards, step, *, segments=None, factor=None, **options):
    """(param, momentum buffer) after a step, elementwise in FP32."""
    with np.errstate(all="ignore"):
        f32 = np.float32
        rate, decay = optim_cases.naive_coefficients(
            len(shards.param), LR, options.get("weight_decay", 0.0), segments
        )
        decay = decay.astype(f32)
        p, buffer = shards.param.numpy(), shards.first.numpy()
        g = optim_cases.naive_gradient(shards, factor, options.get("maximize", False))
        g = np.where(decay != 0, g + decay * p, g)
        if momentum := f32(options.get("momentum", 0.0)):
            grown = f32(1 - options.get("dampening", 0.0)) * g
            buffer = g if step == 1 else buffer * momentum + grown
            g = g + momentum * buffer if options.get("nesterov") else buffer
        return torch.from_numpy(p + (-rate).astype(f32) * g), torch.from_numpy(buffer)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_within_ulps_of_torch_at_every_one_of_ten_steps(options):
    shards = optim_cases.make_shards(20_000, seed=1)
    shards.first.fill_(float("nan"))  # the first step must not read it
    param = shards.param.clone().requires_grad_()
    optimizer = torch.optim.SGD([param], lr=LR, foreach=False, fused=False, **options)
    for step in range(1, 11):
        grad = optim_cases.make_shards(20_000, seed=100 + step).grad
        old, old_buffer = shards.param.clone(), shards.first.clone()
        shards.grad.copy_(grad)
        param.grad = grad.clone()
        optimizer.step()
        step_(shards, step, **options)
        update = (param.detach().double() - old.double()).abs()
        allowed = 2.0**-23 * (torch.maximum(old.abs(), param.detach().abs()) + 3 * update)
        assert ((shards.param.double() - param.detach().double()).abs() <= allowed).all()
        if (buffer := optimizer.state[param].get("momentum_buffer")) is not None:
            largest = (grad, old * options.get("weight_decay", 0.0), old_buffer.nan_to_num())
            assert optim_cases.ulps(shards.first, buffer, *largest) <= 2.0
            shards.first.copy_(buffer)
        shards.param.copy_(param.detach())


CASES = {
    **OPTIONS,
    "segments": {"segments": optim_cases.make_segments(200_000), "momentum": 0.9},
    "factor": {"factor": 0.3, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("step", [1, 2], ids="step {}".format)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numpy_agrees_bit_for_bit(case, step):
    shards = optim_cases.with_special_values(optim_cases.make_shards(200_000, torch.bfloat16))
    param, buffer = naive_sgd(shards, step, **case)
    factor = number(case["factor"], torch.float32) if "factor" in case else None
    after = shards.again()
    step_(after, step, **case | {"factor": factor})
    oracle.assert_same_bits(after.param, param)
    oracle.assert_same_bits(after.first, buffer)
    untouched = shards.again()
    untouched.param.copy_(after.param)
    untouched.first.copy_(after.first)
    optim_cases.assert_same_outcome(after, untouched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_compute_shard(dtype):
    shards = optim_cases.make_shards(70_000, compute_dtype=dtype)
    is_codes = dtype is torch.uint8
    step_(shards, 1, compute_scale=number(100.0, torch.float32) if is_codes else None)
    if is_codes:
        wanted = (shards.param * 100.0).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(shards.compute, wanted.view(torch.uint8))
        assert shards.amax == shards.param.abs().max()
    else:
        oracle.assert_same_bits(shards.compute, shards.param.to(dtype))


def test_a_set_flag_writes_nothing():
    shards = optim_cases.make_shards(5000, compute_dtype=torch.bfloat16)
    before = shards.again()
    step_(shards, 1, momentum=0.9, found_inf=torch.tensor(True))
    optim_cases.assert_same_outcome(shards, before)
    step_(shards, 1, momentum=0.9, found_inf=torch.tensor(False))
    assert not torch.equal(shards.param, before.param)


STEP = torch.tensor(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"momentum": -0.1}, r"momentum: expected a finite number of 0 or more, .* got -0\.1"),
        (
            {"momentum": 0.9},
            r"momentum_buffer: expected a tensor with a momentum of 0\.9, got None",
        ),
        (
            {"momentum_buffer": torch.ones(8)},
            r"momentum_buffer: expected None with .* got a tensor",
        ),
        ({"momentum": 0.9, "momentum_buffer": torch.ones(8)}, r"step: expected a tensor"),
        (
            {"momentum": 0.9, "momentum_buffer": torch.ones(7), "step": STEP},
            r"momentum_buffer: expected 8 elements, as param has, got 7",
        ),
        ({"nesterov": True}, r"nesterov: expected a momentum above 0 and no dampening, got 0\.0"),
        ({"param": torch.ones(8).half()}, r"param: expected torch\.float32, got torch\.float16"),
        ({"grad": torch.ones(9)}, r"grad: expected 8 elements"),
        ({"weight_decay": float("inf")}, r"weight_decay: expected a finite number"),
        ({"amax": STEP}, r"amax: expected None"),
    ],
)
def test_refused_before_anything_is_written(change, message):
    arguments = {
        "param": torch.ones(8),
        "grad": torch.ones(8),
        "momentum_buffer": None,
        "lr": torch.tensor(0.1),
    } | change
    with pytest.raises(ValueError, match=message):
        flat_sgd_(**arguments)
    assert arguments["param"].eq(1).all()


def test_empty_shards_are_no_error():
    flat_sgd_(torch.empty(0), torch.empty(0), None, number(LR))
