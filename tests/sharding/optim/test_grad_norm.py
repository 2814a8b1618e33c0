"""The gradient norm: right, the same bits for every way of sharding, and safe for huge and bad
values.
"""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sidestream as ss
from sidestream.kernels.launch import recorded
from sidestream.kernels.op import launching_on_cpu
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import CASES, MESHES, WORLD, options_of
from sidestream.tests.sharding.trainer import UNIT_CLASSES, Transformer

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


def fill_grads(model: nn.Module, scale: float = 1.0) -> list[torch.Tensor]:
    """Give every parameter of any model the same gradients; returns them whole."""
    generator = torch.Generator().manual_seed(5)
    grads = []
    for param in model.parameters():
        magnitude = torch.rand(param.shape, generator=generator) * 12 - 8
        grad = torch.randn(param.shape, generator=generator) * torch.exp2(magnitude) * scale
        param.grad = grad
        grads.append(grad)
    return grads


def norms(rank: int, world_size: int) -> dict[str, list[float]]:
    values = {}
    for zero in range(4):
        for units in UNIT_CLASSES:
            model = Transformer()
            ss.fully_shard(model, zero_dp_strategy=zero, fsdp_unit_modules=UNIT_CLASSES[units])
            got = []
            for norm_type in NORM_TYPES:
                grads = fill_grads(model)
                got.append(ss.clip_grad_norm_(model, 0.5, norm_type).item())
                factor = min(1.0, 0.5 / (got[-1] + 1e-6))
                for param, grad in zip(model.parameters(), grads, strict=True):
                    torch.testing.assert_close(
                        param.grad.full_tensor(), grad * factor, rtol=1e-6, atol=0
                    )
            values[f"zero{zero} {units}"] = got
    return values


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_same_bits_for_every_sharding_and_right(world_size: int) -> None:
    outcomes = run_on_ranks(norms, world_size)
    reference = outcomes[0]["zero3 block"]
    for values in outcomes:
        for name, got in values.items():
            assert got == reference, name
    grads = torch.cat([grad.reshape(-1) for grad in fill_grads(Transformer())]).double()
    for norm_type, got in zip(NORM_TYPES, reference, strict=True):
        assert got == pytest.approx(torch.linalg.vector_norm(grads, norm_type).item(), rel=1e-6)


def norms_on_meshes(rank: int, world_size: int) -> dict[str, list[float]]:
    values = {}
    options = {mesh: options_of(mesh) for mesh in MESHES}
    for mesh, zero in CASES:
        model = Transformer()
        ss.fully_shard(
            model,
            zero_dp_strategy=zero,
            fsdp_unit_modules=UNIT_CLASSES["block"],
            **options[mesh],
        )
        got = values[f"{mesh} zero{zero}"] = []
        for norm_type in NORM_TYPES:
            grads = fill_grads(model)
            # Torch's, over the gradients that the user sees, and ours.
            seen = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
            got.append(ss.clip_grad_norm_(model, 0.5, norm_type).item())
            torch.testing.assert_close(seen.item(), got[-1], rtol=1e-5, atol=0)
            factor = min(1.0, 0.5 / (got[-1] + 1e-6))
            for param, grad in zip(model.parameters(), grads, strict=True):
                clipped = param.grad.full_tensor()
                torch.testing.assert_close(clipped, grad * factor, rtol=1e-6, atol=0)
    return values


@pytest.mark.slow
def test_same_bits_on_every_mesh() -> None:
    (single,) = run_on_ranks(norms, 1)
    for values in run_on_ranks(norms_on_meshes, WORLD):
        assert len(values) == len(CASES)
        for name, got in values.items():
            assert got == single["zero3 block"], name


def norms_beside_small_gaps(rank: int, world_size: int) -> None:
    # The weight ends one element before a block does.
    plain = nn.Linear(127, 1)
    x = torch.randn(world_size, 4, 127)
    for part in x:
        (plain(part).square().mean() / world_size).backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()]).norm()
    for zero in range(4):
        model = nn.Linear(127, 1)
        model.load_state_dict(plain.state_dict())
        ss.fully_shard(model, zero_dp_strategy=zero)
        model(x[rank]).square().mean().backward()
        norm = ss.clip_grad_norm_(model, 1.0)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gap_of_one_element_adds_nothing(world_size: int) -> None:
    run_on_ranks(norms_beside_small_gaps, world_size)


@pytest.mark.parametrize("scale", [1e-30, 1e30], ids=["tiny", "huge"])
def test_squares_neither_underflow_nor_overflow(scale: float) -> None:
    model = Transformer()
    ss.fully_shard(model)
    grads = torch.cat([grad.reshape(-1) for grad in fill_grads(model, scale)]).double()
    assert ss.clip_grad_norm_(model, 1.0).item() == pytest.approx(grads.norm().item(), rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.0, 1e-6, 1.0], ids=str)
def test_small_gradients_are_scaled_as_by_torch(max_norm: float) -> None:
    plain, model = Transformer(), Transformer()
    ss.fully_shard(model)
    for parameters in (plain, model):
        fill_grads(parameters, 1e-8)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(ss.clip_grad_norm_(model, max_norm), expected, rtol=1e-5, atol=0)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-5, atol=0)


def test_no_gradient_and_zero_gradient() -> None:
    model = Transformer()
    ss.fully_shard(model)
    norm = ss.clip_grad_norm_(model, 1.0)
    assert type(norm) is torch.Tensor and norm.dtype == torch.float32 and norm.item() == 0.0
    fill_grads(model, 0.0)
    assert ss.clip_grad_norm_(model, 1.0).item() == 0.0


def bad_values(rank: int, world_size: int, value: float) -> None:
    model = Transformer()
    ss.fully_shard(model, fsdp_unit_modules=UNIT_CLASSES["block"])
    fill_grads(model)
    if rank == 1:
        max((param.grad.to_local() for param in model.parameters()), key=torch.Tensor.numel)[-1] = (
            value
        )
    before = [param.grad.full_tensor() for param in model.parameters()]
    norm = ss.clip_grad_norm_(model, 0.1)
    assert norm.isnan().item() if math.isnan(value) else norm.item() == math.inf
    for param, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match=r"expected a finite gradient norm, got (nan|inf)"):
        ss.clip_grad_norm_(model, 0.1, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_gradient_on_one_rank_is_told_on_all_and_spreads_nowhere(value: float) -> None:
    run_on_ranks(bad_values, 2, value)


class Counting(TorchDispatchMode):
    """Counts calls of operators."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_a_gpu_gets_as_many_operators_whatever_the_size() -> None:
    """Two launches, and one scaling of all gradients at once."""
    counts = []
    for width in (64, 1024):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        ss.fully_shard(model, fsdp_unit_modules=[nn.Linear])
        fill_grads(model)
        with launching_on_cpu(), recorded() as launches, Counting() as operators:
            ss.clip_grad_norm_(model, 1.0)
        assert [launch.programs for launch in launches] == 2 * [3 * -(-(width**2) * 4 // 65536)]
        counts.append(operators.count)
    assert counts[0] == counts[1] < 60
