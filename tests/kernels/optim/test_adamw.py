"""The definition of flat AdamW: against NumPy bit for bit, against torch.optim.AdamW in ulps.

One step from the same state differs from torch's, whose kernels contract products and sums and may
use a root that is an ulp off, by at most

| exp_avg    | 1 ulp of the largest of its old value, the gradient and its new value   |
| exp_avg_sq | 1 ulp                                                                   |
| param      | 1 ulp where the update is at most 1/8 of it, else 1 ulp + 8 of the update |
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels.optim import op, reference
from sidestream.kernels.optim.op import flat_adamw_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.optim import cases as optim_cases

LR = 1e-3
OPTIONS = {
    "default": {},
    "no decay": {"weight_decay": 0.0},
    "maximize": {"maximize": True, "weight_decay": 0.3},
    "betas": {"betas": (0.95, 0.98), "eps": 1e-6},
    "low beta1": {"betas": (0.3, 0.9)},
    "beta1 zero": {"betas": (0.0, 0.999)},
}
HYPER = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


def torch_adamw(param, **options):
    return torch.optim.AdamW([param], lr=LR, foreach=False, fused=False, **options)


def step_(shards, step, *, lr=LR, **options):
    flat_adamw_(
        shards.param,
        shards.grad,
        shards.first,
        shards.second,
        number(lr),
        number(step, torch.int64),
        compute=shards.compute,
        amax=shards.amax,
        **options,
    )


def differences(actual, before, grad, optimizer):
    """Ulps of (param where the update is small, param after 8 ulps of the update, moments)."""
    (param,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[param]
    old, m, v = before
    update = (param.detach() - old).abs()
    small = update * 8 <= param.detach().abs()
    assert small.float().mean() > 0.9
    excess = actual.param.double() - param.detach().double()
    allowed = 8 * 2.0**-24 * update.double()
    excess = excess.sign() * (excess.abs() - allowed).clamp_min(0)
    reached = (param.detach().double() + excess).float()
    return (
        optim_cases.ulps(actual.param[small], param.detach()[small], old[small]),
        optim_cases.ulps(reached, param.detach(), old),
        optim_cases.ulps(actual.first, state["exp_avg"], m, grad),
        optim_cases.ulps(actual.second, state["exp_avg_sq"], v),
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_within_an_ulp_of_torch_at_every_one_of_ten_steps(options):
    """From torch's own state at every step, so that each is judged alone."""
    shards = optim_cases.make_shards(20_000, seed=1)
    param = shards.param.clone().requires_grad_()
    optimizer = torch_adamw(param, **options)
    shards.first.zero_()
    shards.second.zero_()
    for step in range(1, 11):
        grad = optim_cases.make_shards(20_000, seed=100 + step).grad
        before = [x.clone() for x in (shards.param, shards.first, shards.second)]
        shards.grad.copy_(grad)
        param.grad = grad.clone()
        optimizer.step()
        step_(shards, step, **options)
        assert max(differences(shards, before, grad, optimizer)) <= 1.0
        state = optimizer.state[param]
        for mine, theirs in zip(
            (shards.param, shards.first, shards.second),
            (param.detach(), state["exp_avg"], state["exp_avg_sq"]),
            strict=True,
        ):
            mine.copy_(theirs)


def test_within_ten_ulps_of_torch_after_ten_steps_of_its_own():
    shards = optim_cases.make_shards(20_000, seed=2)
    shards.param.copy_(shards.param.sign() * (shards.param.abs() + 0.05))
    param = shards.param.clone().requires_grad_()
    optimizer = torch_adamw(param)
    shards.first.zero_()
    shards.second.zero_()
    for step in range(1, 11):
        grad = optim_cases.make_shards(20_000, seed=200 + step).grad
        shards.grad.copy_(grad)
        param.grad = grad.clone()
        optimizer.step()
        step_(shards, step)
    assert 0 < optim_cases.ulps(shards.param, param.detach()) <= 10


CASES = {
    "plain": {},
    "segments": {"segments": optim_cases.make_segments(200_000)},
    "fp64 segments": {"segments": optim_cases.make_segments(200_000, torch.float64)},
    "factor, maximize": {"factor": 0.3, "maximize": True},
    "low beta1": {"betas": (0.3, 0.9), "weight_decay": 0.0},
}


@pytest.mark.parametrize("grad_dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_numpy_agrees_bit_for_bit(case, grad_dtype):
    shards = optim_cases.with_special_values(optim_cases.make_shards(200_000, grad_dtype))
    expected = optim_cases.naive_adamw(shards, LR, 7, **HYPER | case)
    factor = number(case["factor"], torch.float32) if "factor" in case else None
    after = shards.again()
    step_(after, 7, **case | {"factor": factor})
    for actual, wanted in zip((after.param, after.first, after.second), expected, strict=True):
        oracle.assert_same_bits(actual, wanted)
    untouched = shards.again()
    for name in ("param", "first", "second"):
        getattr(untouched, name).copy_(getattr(after, name))
    optim_cases.assert_same_outcome(after, untouched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compute_shard_is_the_rounded_parameter(dtype):
    shards = optim_cases.make_shards(5000, compute_dtype=dtype)
    step_(shards, 1)
    oracle.assert_same_bits(shards.compute, shards.param.to(dtype))


@pytest.mark.parametrize("as_codes", [False, True], ids=["float8", "uint8"])
def test_e4m3_compute_shard_and_amax(as_codes):
    shards = optim_cases.make_shards(100_000, compute_dtype=torch.uint8)
    if not as_codes:
        shards.compute = shards.compute.view(torch.float8_e4m3fn)
    step_(shards, 1, compute_scale=number(150.0, torch.float32))
    scaled = (shards.param * 150.0).clamp(-448, 448)
    assert scaled.abs().eq(448).any()
    wanted = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(shards.compute.view(torch.uint8), wanted)
    assert shards.amax == shards.param.abs().max()
    shards.param[70_000] = float("nan")
    step_(shards, 2, compute_scale=number(150.0, torch.float32))
    assert shards.amax.isnan()
    assert shards.compute.view(torch.uint8)[70_000] == 0x7F


def test_amax_is_only_raised():
    shards = optim_cases.make_shards(100, compute_dtype=torch.uint8)
    shards.amax.fill_(1000.0)
    step_(shards, 1, compute_scale=number(1.0, torch.float32))
    assert shards.amax == 1000.0


@pytest.mark.parametrize("flag", [True, 1.0, float("nan"), torch.tensor(-1).int()], ids=str)
def test_a_set_flag_writes_nothing(flag):
    shards = optim_cases.make_shards(5000, compute_dtype=torch.uint8)
    before = shards.again()
    options = {"compute_scale": number(1.0, torch.float32)}
    step_(shards, 1, found_inf=torch.as_tensor(flag), **options)
    optim_cases.assert_same_outcome(shards, before)
    step_(shards, 1, found_inf=torch.zeros_like(torch.as_tensor(flag)), **options)
    assert not torch.equal(shards.param, before.param)


def test_any_sharding_gives_the_same_bits():
    whole = optim_cases.make_shards(150_000, torch.bfloat16, torch.bfloat16)
    parts = whole.again()
    step_(whole, 3)
    for start, end in ((0, 7), (7, 70_000), (70_000, 70_000), (70_000, 150_000)):
        names = ("param", "grad", "first", "second", "compute")
        views = {name: getattr(parts, name)[start:end] for name in names}
        step_(optim_cases.Shards(**views), 3)
    optim_cases.assert_same_outcome(parts, whole)


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99999, 0.0])
def test_powers_are_pythons_for_2047_steps_and_close_beyond(beta):
    for step in (1, 2, 100, 2047):
        assert reference._power(beta, step) == beta**step
    for step in (2048, 2049, 123_456, 5_000_000, 2**33 - 1):
        assert reference._power(beta, step) == pytest.approx(beta**step, rel=2.0**-51)


GOOD = {
    "param": torch.ones(32),
    "grad": torch.ones(32),
    "exp_avg": torch.ones(32),
    "exp_avg_sq": torch.ones(32),
    "lr": torch.tensor(0.1),
    "step": torch.tensor(1),
}
ONES = torch.ones(2)
SEGMENTS = op.Segments
REFUSED = [
    ({"param": torch.ones(4, 8)}, r"param: expected a contiguous 1-D tensor.*\(4, 8\)"),
    ({"param": torch.ones(32).double()}, r"param: expected torch\.float32, got torch\.float64"),
    ({"grad": torch.ones(31)}, r"grad: expected 32 elements, as param has, got 31"),
    ({"grad": torch.ones(64)[::2]}, r"grad: expected a contiguous .* strides \(2,\)"),
    ({"grad": torch.ones(32).int()}, r"grad: expected torch\.float32, .* got torch\.int32; cast"),
    ({"exp_avg": torch.ones(32).bfloat16()}, r"exp_avg: expected torch\.float32, got"),
    ({"exp_avg_sq": torch.ones(32, device="meta")}, r"exp_avg_sq: expected device cpu, got meta"),
    ({"lr": torch.ones(2)}, r"lr: expected one element, got shape \(2,\)"),
    ({"lr": torch.tensor(1)}, r"lr: expected torch\.float32, torch\.float64, got torch\.int64"),
    ({"step": torch.tensor(1).short()}, r"step: expected torch\.int32, "),
    ({"betas": (1.0, 0.9)}, r"betas\[0\]: expected 0 or more and below 1, got 1\.0"),
    ({"betas": (0.9, -0.1)}, r"betas\[1\]: expected .* got -0\.1"),
    ({"eps": float("nan")}, r"eps: expected a finite number of 0 or more, in FP32, got nan"),
    ({"weight_decay": -1.0}, r"weight_decay: expected .* got -1\.0"),
    ({"weight_decay": 1e300}, r"weight_decay: expected a finite .* in FP32, got 1e\+300"),
    ({"factor": torch.tensor(1)}, r"factor: expected torch\.float32, got torch\.int64"),
    ({"found_inf": torch.ones(3)}, r"found_inf: expected one element"),
    ({"compute": torch.ones(32).double()}, r"compute: expected torch\.bfloat16, "),
    ({"compute": torch.ones(32).byte()}, r"compute_scale: expected a tensor, got None"),
    ({"compute_scale": torch.tensor(1.0)}, r"compute_scale: expected None, got a tensor"),
    ({"amax": torch.tensor(1.0)}, r"amax: expected None, got a tensor"),
    ({"segments": SEGMENTS([1, 2], ONES, ONES)}, r"segments\.starts: .* from 0 to at most 32"),
    ({"segments": SEGMENTS([0, 33], ONES, ONES)}, r"segments\.starts: .* got \[0, 33\]"),
    ({"segments": SEGMENTS([], ONES, ONES)}, r"segments\.starts: .* got \[\]"),
    ({"segments": SEGMENTS([0], ONES, ONES)}, r"segments\.lr_scales: expected shape \(1,\)"),
    (
        {"segments": SEGMENTS([0, 8], ONES, ONES.half())},
        r"segments\.weight_decays: expected torch\.float32, .* got torch\.float16",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused_before_anything_is_written(change, message):
    arguments = {name: value.clone() for name, value in GOOD.items()} | change
    with pytest.raises(ValueError, match=message):
        flat_adamw_(**arguments)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert arguments[name].device.type == "meta" or arguments[name].eq(1).all()


def test_empty_shards_are_no_error():
    empty = {name: torch.empty(0) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    segments = op.Segments([0, 0], ONES, ONES)
    flat_adamw_(**GOOD | empty)
    flat_adamw_(**GOOD | empty, segments=segments)


def test_parameters_that_require_gradients():
    param = torch.nn.Parameter(torch.ones(32))
    flat_adamw_(**{name: value.clone() for name, value in GOOD.items()} | {"param": param})
    assert param.is_leaf
    assert param.lt(1).all()


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_run_and_write_nothing(device):
    with FakeTensorMode():
        shard = torch.empty(64, device=device)
        scalar = torch.empty((), device=device)
        assert flat_adamw_(shard, shard, shard.clone(), shard.clone(), scalar, scalar) is None


def test_torch_compile_keeps_the_op_whole():
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def step(shards, lr, count):
        flat_adamw_(*shards, lr, count, weight_decay=0.2)
        return shards[0] + 1.0

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    cases = [optim_cases.make_shards(300).again() for _ in range(2)]
    results = []
    for case, function in zip(cases, (step, compiled), strict=True):
        shards = (case.param, case.grad, case.first, case.second)
        results.append(function(shards, number(LR), number(3, torch.int64)))
    oracle.assert_same_bits(results[1], results[0])
    optim_cases.assert_same_outcome(cases[1], cases[0])
    assert sum(str(graph.graph).count("sidestream.") for graph in graphs) == 1
