"""Operators that make one value of a sharded tensor give the whole tensor's, on every rank; those
over gradients are what monitors and clippers use.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks

EPS = torch.finfo(torch.float32).eps
WORLDS = [1, 2, 3]

SAME_BITS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "amin over a dim": lambda t: t.amin(-1),
    "isnan any": lambda t: t.isnan().any(),
    "isfinite all": lambda t: t.isfinite().all(),
    "count_nonzero": lambda t: t.count_nonzero(),
    "sum": lambda t: t.sum(),
    "mean of magnitudes": lambda t: t.abs().mean(),
    "sum over a dim": lambda t: t.sum(0),
    "any over a dim": lambda t: (t > 0).any(0),
    "standard deviation": lambda t: t.std(),
    "median": lambda t: t.median(),
    "argmax": lambda t: t.argmax(),
    "infinity norm": lambda t: t.norm(math.inf),
    "norms of rows": lambda t: torch.linalg.vector_norm(t, dim=-1),
    "half norm": lambda t: torch.linalg.vector_norm(t, 0.5),
    "norm in double": lambda t: torch.linalg.vector_norm(t, dtype=torch.float64),
    "equal": lambda t: (torch.equal(t, t.clone()), torch.equal(t, t + 1)),
    "allclose": lambda t: (torch.allclose(t, t * 1.0), torch.allclose(t, t + 1)),
    "list of maxima": lambda t: torch._foreach_max([t, t.neg()]),
    "item": lambda t: t.max().item(),
}
NORMS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm 3.5": lambda t: torch.linalg.vector_norm(t, 3.5),
    "all dims": lambda t: torch.linalg.vector_norm(t, dim=tuple(range(t.dim()))),
    "list of norms": lambda t: torch._foreach_norm([t, t * 2], 2),
    "total norm": lambda t: torch.nn.utils.get_total_norm([t, t.neg()], foreach=False),
}

LEAST_DIM = {"sum over a dim": 1, "any over a dim": 1, "all dims": 1, "norms of rows": 2}
LEAST_DIM |= {"standard deviation": 1}


class Odd(nn.Module):
    """Tensors with fewer elements than ranks, none at all, and over several blocks of a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.linear = nn.Linear(17, 31)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.linear(x).tanh() + self.empty.sum()


def _pairs(zero: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Gradients and parameters of a sharded model and of its plain twin, which have equal bits."""
    torch.manual_seed(0)
    plain = Odd()
    sharded = copy.deepcopy(plain)
    ss.fully_shard(sharded, zero_dp_strategy=zero)
    x = torch.randn(5, 17)
    plain(x).square().mean().backward()
    sharded(x).square().mean().backward()
    for (name, theirs), ours in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if theirs.numel():
            grad = ours.grad.full_tensor()
            yield f"gradient of {name}", ours.grad, grad
            yield name, ours, theirs.detach()
            for special in (math.nan, -math.inf):
                ours.grad.masked_fill_(torch.arange(grad.numel()).view(grad.shape) == 0, special)
                yield f"{special} in {name}", ours.grad, ours.grad.full_tensor()


def reduce_all(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for zero in range(4):
        norms = []
        for name, ours, theirs in _pairs(zero):
            for what, reduce in (SAME_BITS | NORMS).items():
                if theirs.dim() < LEAST_DIM.get(what, 0):
                    continue
                with torch.no_grad():
                    got, expected = reduce(ours), reduce(theirs)
                # A norm is one rounding of a sum that is exact beside it: terms of 31 x 17.
                rtol = 0.0 if what in SAME_BITS else 600 * EPS
                torch.testing.assert_close(
                    got,
                    expected,
                    rtol=rtol,
                    atol=0.0,
                    equal_nan=True,
                    msg=lambda t, w=f"{what} of {name}, ZeRO-{zero}": f"{w}: {t}",
                )
                values = got if isinstance(got, list | tuple) else [got]
                assert not any(isinstance(value, ss.ShardedTensor) for value in values)
                # Gradients differ in the last bit: a sum of three thirds is not always one.
                if what in NORMS and isinstance(ours, nn.Parameter):
                    norms += [torch.as_tensor(value).view(torch.int32).item() for value in values]
        found.append(norms)
    assert all(norms == found[0] for norms in found), "bits depend on the level"
    return found[0]


def test_reductions_give_the_whole_tensors_result_and_norms_the_same_bits_everywhere() -> None:
    results = [run_on_ranks(reduce_all, world_size, timeout_s=100) for world_size in WORLDS]
    assert all(bits == results[0][0] for ranks in results for bits in ranks)


def test_half_precision_norms_are_of_the_gradients_dtype() -> None:
    model = nn.Linear(40, 40)
    policy = ss.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=None)
    ss.fully_shard(model.bfloat16(), mixed_precision_policy=policy)
    model(torch.ones(2, 40, dtype=torch.bfloat16)).sum().backward()
    norm = model.weight.grad.norm()
    assert norm.dtype == torch.bfloat16
    assert norm == model.weight.grad.full_tensor().float().norm().bfloat16()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_sharded_parameter_in_a_loss_is_refused_with_the_differentiable_way(zero: int) -> None:
    model = nn.Linear(3, 2)
    ss.fully_shard(model, zero_dp_strategy=zero)
    assert model.weight.norm() > 0, "looking needs no no_grad"
    for penalty in (lambda p: p.pow(2).sum(), lambda p: p.norm(), lambda p: p.sum()):
        loss = model(torch.ones(1, 3)).sum() + penalty(model.weight)
        with pytest.raises(RuntimeError, match=r"'weight'.*use p.full_tensor\(\) there instead"):
            loss.backward()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 3))


def test_unfrozen_later_is_guarded_too() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    ss.fully_shard(model)
    model.requires_grad_(True)
    loss = model(torch.ones(1, 3)).sum() + model.weight.sum()
    with pytest.raises(RuntimeError, match="full_tensor"):
        loss.backward()
