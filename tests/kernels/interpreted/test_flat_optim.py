"""The interpreted AdamW and SGD kernels against the definition, bit for bit, with canaries."""

import pytest
import torch

from sidestream.kernels.optim import adamw, reference, sgd
from sidestream.kernels.optim.tiles import SEGMENTS_A_PROGRAM
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.optim import cases as optim_cases

NUMEL = 3 * 2048 + 100  # full tiles at every width of the narrowest side, and a tail
SHARED = {
    "weight_decay": 0.01, "maximize": False, "starts": [], "lr_scales": None, "weight_decays": None,
    "factor": None, "found_inf": None, "compute_scale": None,
}  # fmt: skip
ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
SGD = {"momentum": 0.9, "dampening": 0.1, "nesterov": False}


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def adamw_step(module, shards, step, options):
    module.flat_adamw_(
        shards.param,
        shards.grad,
        shards.first,
        shards.second,
        scalar(1e-3),
        step,
        compute=shards.compute,
        amax=shards.amax,
        **SHARED | ADAMW | options,
    )


def sgd_step(module, shards, step, options):
    options = SHARED | SGD | options
    has_momentum = options["momentum"] != 0
    module.flat_sgd_(
        shards.param,
        shards.grad,
        shards.first if has_momentum else None,
        scalar(1e-2, torch.float64),
        step if has_momentum else None,
        compute=shards.compute,
        amax=shards.amax,
        **options,
    )


def segment_options(numel=NUMEL, dtype=torch.float32):
    segments = optim_cases.make_segments(numel, dtype)
    return {
        "starts": segments.starts,
        "lr_scales": segments.lr_scales,
        "weight_decays": segments.weight_decays,
    }


def check(step_, kernels, shards, step=3, **options):
    """One step of the kernel and of the definition, from the same values."""
    count = step if isinstance(step, torch.Tensor) else scalar(step, torch.int32)
    if shards.amax is not None:
        options["compute_scale"] = scalar(150.0)
    before, expected = shards.again(), shards.again()
    step_(kernels, shards, count, options)
    step_(reference, expected, count, options)
    optim_cases.assert_same_outcome(shards, expected)
    return before


@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16, torch.uint8], ids=str)
@pytest.mark.parametrize("grad", oracle.DTYPES, ids=str)
def test_adamw_dtypes(grad, compute):
    shards = optim_cases.with_special_values(optim_cases.make_shards(NUMEL, grad, compute))
    check(adamw_step, adamw, shards)


ADAMW_CASES = {
    "segments": segment_options(),
    "fp64 segments, factor": segment_options(dtype=torch.float64) | {"factor": scalar(0.3)},
    "maximize": {"maximize": True},
    "low beta1": {"beta1": 0.25, "beta2": 0.9},
    "large decay": {"weight_decay": 123.456},
    "flag not set": {"found_inf": scalar(0, torch.int32)},
}


@pytest.mark.parametrize("options", ADAMW_CASES.values(), ids=ADAMW_CASES)
def test_adamw_options(options):
    shards = optim_cases.make_shards(NUMEL, torch.bfloat16, torch.uint8)
    check(adamw_step, adamw, shards, **options)


@pytest.mark.parametrize("step_", [adamw_step, sgd_step], ids=["adamw", "sgd"])
def test_more_segments_than_a_program_makes_the_scalars_of(step_):
    """Each with its own; nearly all of them have no elements."""
    starts = [*[0] * (SEGMENTS_A_PROGRAM - 2), 0, 16, 32, 80]
    options = {
        "starts": starts,
        "lr_scales": torch.linspace(0.1, 2.0, len(starts)),
        "weight_decays": torch.linspace(0.0, 0.5, len(starts), dtype=torch.float64),
    }
    module = adamw if step_ is adamw_step else sgd
    check(step_, module, optim_cases.make_shards(100), **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("step", [1, 2047, 2048, 10_000_000])
def test_adamw_steps(step, dtype):
    check(adamw_step, adamw, optim_cases.make_shards(100), scalar(step, dtype))


SGD_CASES = {
    "plain": {"momentum": 0.0, "dampening": 0.0},
    "momentum": {},
    "nesterov": {"dampening": 0.0, "nesterov": True, "maximize": True},
    "segments": segment_options(),
    "factor, no decay": {"factor": scalar(0.3), "weight_decay": 0.0},
}


@pytest.mark.parametrize("step", [1, 2], ids="step {}".format)
@pytest.mark.parametrize("options", SGD_CASES.values(), ids=SGD_CASES)
def test_sgd_options(options, step):
    shards = optim_cases.make_shards(NUMEL, torch.bfloat16, torch.bfloat16)
    check(sgd_step, sgd, optim_cases.with_special_values(shards), step, **options)


@pytest.mark.parametrize("compute", [None, torch.uint8], ids=str)
def test_sgd_dtypes(compute):
    for grad in oracle.DTYPES:
        check(sgd_step, sgd, optim_cases.make_shards(NUMEL, grad, compute))


OPTIMIZERS = pytest.mark.parametrize(
    ("step_", "kernels"), [(adamw_step, adamw), (sgd_step, sgd)], ids=["adamw", "sgd"]
)


@OPTIMIZERS
@pytest.mark.parametrize("flag", [True, 1.0, float("nan"), -1], ids=str)
def test_a_set_flag_writes_nothing(step_, kernels, flag):
    shards = optim_cases.make_shards(3000, compute_dtype=torch.uint8)
    flag = torch.tensor(flag) if not isinstance(flag, int) else scalar(flag, torch.int32)
    before = check(step_, kernels, shards, found_inf=flag)
    optim_cases.assert_same_outcome(shards, before)


@OPTIMIZERS
def test_unaligned_memory(step_, kernels):
    shards = optim_cases.make_shards(NUMEL, torch.bfloat16, torch.bfloat16, late=1)
    assert shards.grad.data_ptr() % 16
    check(step_, kernels, shards)


@OPTIMIZERS
def test_small_and_empty_shards(step_, kernels):
    for numel in (0, 1, 130):
        check(step_, kernels, optim_cases.make_shards(numel))
    empty = optim_cases.make_shards(0)
    ones = torch.ones(2)
    check(step_, kernels, empty, starts=[0, 0], lr_scales=ones, weight_decays=ones)


@OPTIMIZERS
def test_a_nan_stays_in_the_amax(step_, kernels):
    shards = optim_cases.make_shards(3000, compute_dtype=torch.uint8)
    shards.param[2999] = float("nan")
    check(step_, kernels, shards)
    assert shards.amax.isnan()


@OPTIMIZERS
def test_an_amax_is_only_raised(step_, kernels):
    shards = optim_cases.make_shards(3000, compute_dtype=torch.uint8)
    shards.amax.fill_(1000.0)
    check(step_, kernels, shards)
    assert shards.amax == 1000.0
