"""Tests of `ShardedTensor`: elementwise work on the local part, gradients, gathering, refusals."""

import copy
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import run_on_ranks

SHAPE, START, STOP = (7, 3), 4, 15
SHAPES = [(7, 3), (5,), (2, 2, 3), (1, 9), (), (0, 4)]


def _full(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def _part(full: Tensor, **options: Any) -> tuple[ShardedTensor, Tensor]:
    """Elements START..STOP of `full` as a sharded tensor, and the flat tensor it is a view of."""
    flat = torch.full((STOP - START + 8,), float("nan")).to(full.dtype)
    local = flat[3 : 3 + STOP - START]
    local.copy_(full.reshape(-1)[START:STOP])
    return ShardedTensor(local, full.shape, START, name="weight", **options), flat


def _interval(full: Tensor) -> Tensor:
    return full.reshape(-1)[START:STOP]


ELEMENTWISE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda a, b, c: a + b,
    "mul scalar": lambda a, b, c: 2.5 * a,
    "sub 0-d": lambda a, b, c: a - torch.tensor(0.25),
    "div": lambda a, b, c: a / b,
    "sqrt abs": lambda a, b, c: a.abs().sqrt(),
    "clamp": lambda a, b, c: a.clamp(-0.5, 0.5),
    "isfinite": lambda a, b, c: torch.isfinite(a / 0.0),
    "less than": lambda a, b, c: a < b,
    "equal scalar": lambda a, b, c: a == 0.5,
    "where": lambda a, b, c: torch.where(a > 0, b, c),
    "lerp": lambda a, b, c: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.3),
    "clone": lambda a, b, c: a.clone(memory_format=torch.contiguous_format),
    "zeros_like": lambda a, b, c: torch.zeros_like(a),
    "ones_like": lambda a, b, c: torch.ones_like(a, dtype=torch.float64),
    "full_like": lambda a, b, c: torch.full_like(a, 2.0),
    "empty_like": lambda a, b, c: torch.empty_like(a).copy_(b),
    "masked_fill": lambda a, b, c: a.masked_fill(b > 0, 1.0),
    "foreach add": lambda a, b, c: torch._foreach_add([a, b], [c, a], alpha=2)[0],
    "foreach sqrt": lambda a, b, c: torch._foreach_sqrt([a.abs()])[0],
    "foreach maximum": lambda a, b, c: torch._foreach_maximum([a], [b])[0],
}

IN_PLACE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mul_": lambda a, b, c: a.mul_(0.5),
    "add_": lambda a, b, c: a.add_(b, alpha=-0.1),
    "copy_": lambda a, b, c: a.copy_(b),
    "zero_": lambda a, b, c: a.zero_(),
    "fill_": lambda a, b, c: a.fill_(3.0),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.3),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c, value=0.3),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, c, value=0.3),
    "clamp_": lambda a, b, c: a.clamp_(min=0.0),
    "masked_fill_": lambda a, b, c: a.masked_fill_(b > 0, 1.0),
    "data mul_": lambda a, b, c: a.data.mul_(0.5),
    "detach mul_": lambda a, b, c: a.detach().mul_(0.5),
    "data assignment": lambda a, b, c: setattr(a, "data", b * 2),
    "out": lambda a, b, c: torch.add(b, c, out=a),
    "foreach add_": lambda a, b, c: torch._foreach_add_([a], [b], alpha=0.5),
    "foreach mul_": lambda a, b, c: torch._foreach_mul_([a], torch.tensor(0.5)),
    "foreach addcdiv_": lambda a, b, c: torch._foreach_addcdiv_([a], [b], [c], [0.5]),
    "foreach copy_": lambda a, b, c: torch._foreach_copy_([a], [b]),
    "foreach zero_": lambda a, b, c: torch._foreach_zero_([a]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_result_is_the_interval_of_the_full_result(name: str) -> None:
    fulls = [_full(seed) for seed in range(3)]
    parts = [_part(full)[0] for full in fulls]
    before = [part.local.clone() for part in parts]
    expected, result = ELEMENTWISE[name](*fulls), ELEMENTWISE[name](*parts)
    assert isinstance(result, ShardedTensor) and result.has_layout_of(parts[0])
    assert (result.shape, result.dtype, result.name) == (expected.shape, expected.dtype, "weight")
    assert torch.equal(result.to_local(), _interval(expected))
    assert all(torch.equal(part.local, local) for part, local in zip(parts, before, strict=True))


@pytest.mark.parametrize("plain_operands", [False, True], ids=["sharded", "full plain operands"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_edit_the_flat_tensor_and_bump_its_version(
    name: str, plain_operands: bool
) -> None:
    fulls = [_full(seed) for seed in range(3)]
    (a, flat), *others = [_part(full) for full in fulls]
    operands = fulls[1:] if plain_operands else [part for part, _ in others]
    if plain_operands and name == "out":
        operands = [others[0][0], fulls[2]]
    version = flat._version
    result = IN_PLACE[name](a, *operands)
    IN_PLACE[name](*fulls)
    assert flat._version > version
    assert torch.equal(flat[3 : 3 + STOP - START], _interval(fulls[0]))
    assert flat[:3].isnan().all() and flat[3 + STOP - START :].isnan().all()
    if not name.startswith(("data", "detach", "foreach")):
        assert result is a


def test_a_non_contiguous_full_operand_is_cut_in_row_major_order() -> None:
    full = _full(0)
    part, _ = _part(torch.zeros(SHAPE))
    part.copy_(full.t().contiguous().t())
    assert torch.equal(part.local, _interval(full))


def test_autograd_passes_through_elementwise_operators() -> None:
    part, _ = _part(_full(0), requires_grad=True)
    result = (part * 2).exp()
    assert result.requires_grad
    (grad,) = torch.autograd.grad(result, part, torch.ones_like(result))
    assert torch.allclose(grad.to_local(), 2 * (2 * part.local).exp())


def test_in_place_on_a_leaf_needs_no_grad() -> None:
    part, _ = _part(_full(0), requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        part.mul_(2)


REFUSED: dict[str, tuple[Callable[[ShardedTensor], Any], str]] = {
    "linear": (
        lambda p: nn.functional.linear(torch.ones(2, 3), p),
        "aten.t.default is not elementwise",
    ),
    "matmul": (lambda p: torch.ones(2, 7) @ p, "call the unit's module itself"),
    "sum without a group": (lambda p: p.sum(), r"elements 4..15 of 21.*got None"),
    "maximum without a group": (lambda p: p.max(), "expected the process group"),
    "view": (lambda p: p.view(-1), "sharded parameter 'weight'"),
    "index": (lambda p: p[0], "not elementwise"),
    "item": (lambda p: p.item(), "cannot be converted to Scalar"),
    "foreach norm without a group": (lambda p: torch._foreach_norm([p]), "make the ShardedTensor"),
    "normal_": (lambda p: p.data.normal_(), "before fully_shard"),
    "xavier": (lambda p: nn.init.xavier_uniform_(p), "draw other numbers on each rank"),
    "rand_like": (lambda p: torch.rand_like(p), "draw other numbers on each rank"),
    "dtype": (lambda p: p.to(torch.bfloat16), r"convert the model before fully_shard"),
    "device": (lambda p: p.to("meta"), r"convert the model before fully_shard"),
    "data dtype": (lambda p: setattr(p, "data", torch.zeros(SHAPE).double()), "convert the model"),
    "wrong shape": (
        lambda p: p.data.copy_(torch.zeros(3, 7)),
        r"full shape \(7, 3\).*got shape \(3, 7\)",
    ),
    "broadcast": (lambda p: p.data.add_(torch.zeros(3)), r"full shape \(7, 3\).*got shape \(3,\)"),
    "plain target": (
        lambda p: torch.zeros(SHAPE).copy_(p),
        "expected a sharded tensor to write to",
    ),
    "plain target in a list": (
        lambda p: torch._foreach_copy_([torch.zeros(SHAPE)], [p]),
        "to write to",
    ),
    "other layout": (lambda p: p.data + ShardedTensor(torch.zeros(5), SHAPE, 0), "of one layout"),
    "grad shape": (lambda p: setattr(p, "grad", torch.zeros(3)), r"expected shape \(7, 3\)"),
    "grad layout": (
        lambda p: setattr(p, "grad", ShardedTensor(torch.zeros(5), SHAPE, 0)),
        "expected its layout",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_name_and_the_fix_and_nothing_changed(name: str) -> None:
    part, flat = _part(_full(0), requires_grad=True)
    before = flat.clone()
    with pytest.raises(RuntimeError, match=REFUSED[name][1]), torch.no_grad():
        REFUSED[name][0](part)
    assert torch.equal(flat, before) or torch.equal(flat.isnan(), before.isnan())
    assert torch.equal(part.local, before[3 : 3 + STOP - START])


def test_copies_and_pickles_are_refused_with_the_way_to_take_whole_tensors() -> None:
    part, _ = _part(_full(0), requires_grad=True)
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"'weight'.*full_state_dict\(module\)"):
            take(part)


@pytest.mark.parametrize(
    ("local", "start", "options", "message"),
    [
        (torch.zeros(2, 2), 0, {}, "expected 1-D and contiguous"),
        (torch.zeros(8)[::2], 0, {}, "expected 1-D and contiguous"),
        (torch.zeros(4), 18, {}, r"within shape \(7, 3\), got \[18, 22\)"),
        (torch.zeros(4), 0, {"intervals": ((0, 5),)}, r"\(0, 4\) for rank 0"),
        (torch.zeros(4), 0, {"intervals": ((0, 4), (4, 8))}, "each of 1 ranks"),
    ],
    ids=["2-D", "strided", "beyond", "another interval", "too many ranks"],
)
def test_a_local_part_that_does_not_fit_is_refused(
    local: Tensor, start: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedTensor(local, SHAPE, start, name="weight", **options)


def test_looks_like_the_whole_tensor_and_prints_what_it_holds() -> None:
    part, _ = _part(_full(0), requires_grad=True)
    assert (part.shape, part.numel(), part.dim(), part.size(1)) == (SHAPE, 21, 2, 3)
    assert part.is_leaf and part.stride() == (3, 1)
    text = repr(part)
    for piece in (
        "'weight'",
        "shape=(7, 3)",
        "torch.float32",
        "elements 4..15 of 21",
        "rank 0 of 1",
    ):
        assert piece in text
    assert f"{part}" == str(part) == text


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_counts_as_a_parameter(requires_grad: bool) -> None:
    part, _ = _part(_full(0), requires_grad=requires_grad, is_parameter=True)
    assert isinstance(part, nn.Parameter)
    module = nn.Module()
    module.weight = part
    assert dict(module.named_parameters()) == {"weight": part}
    assert module.state_dict()["weight"].to_local().data_ptr() == part.local.data_ptr()
    module.requires_grad_(not requires_grad)
    assert part.requires_grad is not requires_grad
    wrapped = nn.Parameter(_part(_full(0))[0])
    assert (
        type(wrapped) is ShardedTensor
        and wrapped.requires_grad
        and isinstance(wrapped, nn.Parameter)
    )
    assert not isinstance(_part(_full(0))[0], nn.Parameter)


def test_loads_a_full_plain_state_dict() -> None:
    module, plain = nn.Module(), nn.Linear(3, 7, bias=False)
    module.weight, flat = _part(torch.zeros(SHAPE), requires_grad=True)
    version = flat._version
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.weight.local, _interval(plain.weight.detach()))
    assert flat._version > version
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": torch.zeros(3, 7)})


class _Source:
    def __init__(self) -> None:
        self.value: ShardedTensor | None = None

    def get_grad(self, parameter: ShardedTensor) -> ShardedTensor | None:
        return self.value

    def set_grad(self, parameter: ShardedTensor, value: ShardedTensor | None) -> None:
        self.value = value


def test_grad_without_a_source_is_a_plain_attribute() -> None:
    part, _ = _part(_full(0), requires_grad=True)
    assert part.grad is None
    part.grad = grad = _part(_full(1))[0]
    assert part.grad is grad
    part.grad = _full(2)
    assert torch.equal(part.grad.to_local(), _interval(_full(2)))
    del part.grad
    assert part.grad is None


def test_grad_goes_to_the_source_and_a_weak_one_is_not_kept_alive() -> None:
    source = _Source()
    part, _ = _part(_full(0), grad_source=weakref.proxy(source))
    assert isinstance(part, nn.Parameter)
    part.grad = grad = _part(_full(1))[0]
    assert source.value is grad is part.grad
    part.grad = None
    assert source.value is None
    alive = weakref.ref(source)
    del source
    assert alive() is None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("owner", ["module", "optimizer"])
def test_zero_grad(owner: str, set_to_none: bool) -> None:
    source, module = _Source(), nn.Module()
    module.weight, _ = _part(_full(0), requires_grad=True, grad_source=source)
    source.value = grad = _part(_full(1))[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    (module if owner == "module" else optimizer).zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert source.value is None
    else:
        assert source.value is grad and not grad.local.any()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw default": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_optimizer_over_sharded_tensors_steps_like_one_over_the_full_ones(
    name: str,
) -> None:
    full = nn.Parameter(_full(0))
    part, flat = _part(full.detach(), requires_grad=True)
    empty = ShardedTensor(torch.zeros(0), (2, 2), 4, name="empty", requires_grad=True)
    optimizer, reference = OPTIMIZERS[name]([part, empty]), OPTIMIZERS[name]([full])
    for step in range(3):
        version = flat._version
        part.grad, full.grad = _part(_full(step + 1))[0], _full(step + 1)
        empty.grad = torch.zeros(2, 2)
        optimizer.step()
        reference.step()
        assert flat._version > version
    # Vector and tail code of a fused kernel round differently, and the parts have other tails.
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(part.local, _interval(full.detach()), rtol=8 * eps, atol=8 * eps)
    for key, value in optimizer.state[part].items():
        expected = reference.state[full][key]
        if isinstance(value, ShardedTensor):
            value, expected = value.local, _interval(expected)
        assert torch.allclose(value, expected, rtol=8 * eps, atol=8 * eps), key


def _cuts(numel: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Uneven intervals: a first rank without elements where there are several, cuts inside rows."""
    stops = [0 if world_size > 1 else numel] + [
        -(-numel * r // (world_size - 1)) for r in range(1, world_size)
    ]
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def _gather_all(rank: int, world_size: int) -> list[str]:
    """What went wrong."""
    wrong = []
    for shape, dtype, cut in itertools.product(
        SHAPES, (torch.float32, torch.bfloat16, torch.bool), ("uneven", "replicated", "pairs")
    ):
        full = (torch.arange(torch.Size(shape).numel()) % 5).to(dtype).reshape(shape)
        intervals = _cuts(full.numel(), world_size)
        if cut == "replicated":
            intervals = ((0, full.numel()),) * world_size
        elif cut == "pairs" and world_size % 2 == 0:
            intervals = _cuts(full.numel(), world_size // 2) * 2
        start, stop = intervals[rank]
        local = full.reshape(-1)[start:stop].clone()
        part = ShardedTensor(
            local, shape, start, name="x", group=dist.group.WORLD, intervals=intervals
        )
        gathered = part.full_tensor()
        same = type(gathered) is Tensor and torch.equal(gathered, full) and gathered.dtype == dtype
        gathered.zero_()
        if not same or not torch.equal(local, full.reshape(-1)[start:stop]):
            wrong.append(f"{shape} {dtype} {cut}")
    return wrong


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_full_tensor_puts_uneven_intervals_together(world_size: int) -> None:
    assert run_on_ranks(_gather_all, world_size, timeout_s=60) == [[]] * world_size
