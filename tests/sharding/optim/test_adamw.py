"""`sidestream.AdamW`: the bits of torch's fused operator on a CPU, those of `flat_adamw_` where
kernels are launched, and torch's options, state and state dicts.
"""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.kernels.op import launching_on_cpu
from sidestream.kernels.optim import op, reference
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Block, Transformer, batch, full_params, loss_of
from sidestream.tests.sharding.twins import LEVELS

DTYPES = [torch.float32, torch.bfloat16]
OPTIONS = {
    "default": {},
    "maximize, betas": {"maximize": True, "betas": (0.3, 0.99), "eps": 1e-6},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.3},
    "tensor lr": {"lr": torch.tensor(0.02)},
    "capturable": {"capturable": True},
}


def torch_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **{"lr": 1e-2} | options)


def our_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return ss.AdamW(params, **{"lr": 1e-2} | options)


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, the others without, at another rate."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-2},
    ]


def sharded(
    make: Any, zero: int, dtype: torch.dtype = torch.float32, *, before: bool = True, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer over two groups, made before `fully_shard` or after it."""
    torch.manual_seed(0)
    model = Transformer()
    policy = ss.MixedPrecisionPolicy(param_dtype=dtype)
    kwargs: dict[str, Any] = {"zero_dp_strategy": zero, "mixed_precision_policy": policy}
    if before:
        optimizer = make(by_decay(model), **options)
        ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block], **kwargs)
    else:
        ss.fully_shard_model(model, fsdp_unit_modules=[Block], **kwargs)
        optimizer = ss.fully_shard_optimizer(make(by_decay(model), **options))
    return model, optimizer


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, world: int = 1
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, rank=rank, world_size=world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(model: nn.Module, other: nn.Module) -> None:
    expected = full_params(other)
    for name, value in full_params(model).items():
        assert torch.equal(value, expected[name]), name


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    ours, theirs = one.state_dict()["state"], other.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, entries in ours.items():
        assert entries.keys() == theirs[index].keys()
        for key, value in entries.items():
            wanted = theirs[index][key]
            if isinstance(value, ss.ShardedTensor):
                value, wanted = value.local, wanted.local
            assert torch.equal(value, wanted), (index, key)


# ---- numbers


def parity(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for zero in LEVELS[world_size]:
        for before in (True, False):
            twins = [sharded(make, zero, dtype, before=before) for make in (torch_adamw, our_adamw)]
            losses = [train(*twin, range(3), rank, world_size) for twin in twins]
            assert losses[0] == losses[1], f"ZeRO-{zero}"
            assert_same(twins[1][0], twins[0][0])
            assert_same_state(twins[1][1], twins[0][1])
            assert len(set(losses[0])) == 3, "it trains"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_it_has_the_bits_of_torchs_fused_operator(
    world_size: int, dtype: torch.dtype
) -> None:
    run_on_ranks(parity, world_size, dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_give_what_torch_gives_plain_and_sharded(options: dict[str, Any]) -> None:
    for zero in (None, 1):
        models, optimizers = [], []
        for make in (torch_adamw, our_adamw):
            if zero is None:
                torch.manual_seed(0)
                model = Transformer()
                optimizer = make(by_decay(model), **options)
            else:
                model, optimizer = sharded(make, zero, torch.bfloat16, **options)
            train(model, optimizer, range(3))
            models.append(model)
            optimizers.append(optimizer)
        assert_same(models[1], models[0])
        assert_same_state(optimizers[1], optimizers[0])


def test_a_schedule_and_groups_that_change_between_steps() -> None:
    pairs = [sharded(make, 1, torch.bfloat16) for make in (torch_adamw, our_adamw)]
    for model, optimizer in pairs:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
            optimizer.param_groups[0]["betas"] = (0.8, 0.95)
            optimizer.param_groups[1]["amsgrad"] = False
    assert_same(pairs[1][0], pairs[0][0])


def test_amsgrad_of_one_group_alone() -> None:
    pairs = []
    for make in (torch_adamw, our_adamw):
        torch.manual_seed(0)
        model = Transformer()
        groups = by_decay(model)
        groups[0]["amsgrad"] = True
        optimizer = make(groups)
        ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=2)
        train(model, optimizer, range(3))
        pairs.append((model, optimizer))
    assert_same(pairs[1][0], pairs[0][0])
    assert_same_state(pairs[1][1], pairs[0][1])


def test_a_closure_is_called_once_with_gradients_and_its_value_returned() -> None:
    pairs = [sharded(make, 1, torch.bfloat16) for make in (torch_adamw, our_adamw)]
    for model, optimizer in pairs:
        for step in range(3):
            calls = []

            def closure(
                model: nn.Module = model, step: int = step, calls: list[int] = calls
            ) -> torch.Tensor:
                calls.append(step)
                model.zero_grad()
                loss = loss_of(model, batch(step))
                loss.backward()
                return loss

            value = optimizer.step(closure)
            assert calls == [step] and isinstance(value, torch.Tensor)
    assert_same(pairs[1][0], pairs[0][0])


def test_what_has_no_gradient_is_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = ss.AdamW([used, unused], lr=0.5)
    used.grad = torch.ones(3)
    optimizer.step()
    assert not used.eq(1).any() and unused.eq(1).all()
    assert list(optimizer.state) == [used]
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[used]["step"] == 1


def test_parameters_of_any_dtype_and_stride_beside_each_other() -> None:
    def params() -> list[nn.Parameter]:
        torch.manual_seed(3)
        wide = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
        return [
            nn.Parameter(x)
            for x in (wide, torch.randn(9).double(), torch.randn(9).bfloat16(), torch.randn(()))
        ]

    twins = params(), params()
    optimizers = torch_adamw(twins[0]), our_adamw(twins[1])
    for step in range(3):
        for twin, optimizer in zip(twins, optimizers, strict=True):
            torch.manual_seed(step)
            for param in twin:
                param.grad = torch.randn_like(param)
            optimizer.step()
    for theirs, ours in zip(*twins, strict=True):
        assert torch.equal(theirs, ours)


# ---- refusals

REFUSED = {
    "foreach": ({"foreach": True}, r"foreach: expected None or False, got True"),
    "differentiable": ({"differentiable": True}, r"differentiable: expected None or False, got"),
    "fused": ({"fused": False}, r"fused: expected None or True, got False"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_other_ways_to_compute_are_refused(options: dict[str, Any], message: str) -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        ss.AdamW([param], **options)
    with pytest.raises(ValueError, match=message):
        ss.AdamW([{"params": [param], **options}])
    optimizer = ss.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [param], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.nn.Embedding(4, 2, sparse=True).weight, r"torch.float32 with a torch.sparse_coo"),
        (nn.Parameter(torch.ones(4, 2, dtype=torch.complex64)), r"got torch.complex64 with a"),
    ],
    ids=["sparse", "complex"],
)
def test_gradients_that_it_cannot_take_change_nothing(param: nn.Parameter, message: str) -> None:
    before = param.detach().clone()
    first = nn.Parameter(torch.ones(2))
    optimizer = ss.AdamW([first, param])
    first.grad = torch.ones(2)
    if param.is_complex():
        param.grad = torch.ones_like(param)
    else:
        torch.nn.functional.embedding(torch.tensor([1]), param, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert first.eq(1).all() and torch.equal(param, before) and not optimizer.state


def test_a_plain_graph_from_before_the_step_fails_in_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = ss.AdamW(model.parameters())
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- state


def pair_of(zero: int | None) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model each with torch's optimizer, as most people make it, and with ours."""
    found = []
    for make in (lambda params: torch.optim.AdamW(params, lr=1e-2), our_adamw):
        if zero is None:
            torch.manual_seed(0)
            model = Transformer()
            found.append((model, make(by_decay(model))))
        else:
            found.append(sharded(make, zero))
    return found


@pytest.mark.parametrize("zero", [None, 3], ids=["plain", "ZeRO-3"])
def test_state_dicts_go_to_torchs_and_back(zero: int | None) -> None:
    for source, target in ((0, 1), (1, 0)):
        twins = pair_of(zero)
        for model, optimizer in twins:
            train(model, optimizer, range(2))
        (model, optimizer), (other, other_optimizer) = twins[source], twins[target]
        state = copy.deepcopy(optimizer.state_dict())
        assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        other_optimizer.load_state_dict(state)
        other.load_state_dict(
            copy.deepcopy(dict(model.state_dict())) if zero is None else ss.full_state_dict(model)
        )
        assert_same_state(other_optimizer, optimizer)
        if target:
            assert all(group["fused"] for group in other_optimizer.param_groups)
        train(model, optimizer, range(2, 4))
        train(other, other_optimizer, range(2, 4))
        for name, value in full_params(other).items():
            torch.testing.assert_close(
                value, full_params(model)[name], rtol=1e-5, atol=1e-6, msg=name
            )


def test_counters_as_others_keep_them_are_taken() -> None:
    param = nn.Parameter(torch.ones(4))
    for counter in (7, 7.0, torch.tensor(7, dtype=torch.int64), torch.tensor(7.0).double()):
        optimizer = ss.AdamW([param])
        moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
        optimizer.state[param] = {"step": counter, **moments}
        param.grad = torch.ones(4)
        optimizer.step()
        assert optimizer.state[param]["step"] == 8
        assert optimizer.state[param]["step"].dtype is torch.float32


def checkpoints(rank: int, world_size: int, folder: str) -> None:
    for number, (source, target) in enumerate([(torch_adamw, our_adamw), (our_adamw, torch_adamw)]):
        path = f"{folder}/{number}"
        model, optimizer = sharded(source, 3, torch.bfloat16)
        train(model, optimizer, range(2), rank, world_size)
        ss.save_checkpoint(path, model, optimizer)
        train(model, optimizer, range(2, 4), rank, world_size)
        other, other_optimizer = sharded(target, 1, torch.bfloat16)
        train(other, other_optimizer, range(5, 7), rank, world_size)
        ss.load_checkpoint(path, other, other_optimizer)
        train(other, other_optimizer, range(2, 4), rank, world_size)
        assert_same(other, model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_go_to_torchs_and_back(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(checkpoints, world_size, str(tmp_path))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_steps_like_the_original(how: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = ss.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model, optimizer = how((model, optimizer))
    assert optimizer._step_supports_amp_scaling
    before = model.weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["step"] == 2


def test_a_subclass_that_overrides_step_is_refused_unless_declared() -> None:
    class Odd(ss.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="expected an optimizer known to be elementwise"):
        ss.fully_shard(model, Odd(model.parameters()))


def other_kind(rank: int, world_size: int) -> None:
    model = Transformer()
    make = our_adamw if rank else torch_adamw
    with pytest.raises(ValueError, match="optimizer"):
        ss.fully_shard(model, make(model.parameters()))


def test_ranks_with_torchs_and_ours_are_refused() -> None:
    run_on_ranks(other_kind, 2)


# ---- where kernels are launched


@pytest.fixture
def as_on_a_gpu() -> Iterator[list[dict[str, Any]]]:
    """Within `launching_on_cpu`, `flat_adamw_` is its definition; what it was called with."""
    calls: list[dict[str, Any]] = []

    def flat_adamw_(*shards: torch.Tensor, **options: Any) -> None:
        calls.append(options)
        with torch.no_grad():
            reference.flat_adamw_(*(shard.detach() for shard in shards), **options)

    with mock.patch.dict(op._FLAT_ADAMW.by_device, {"cuda": flat_adamw_}):
        yield calls


def step_launching(optimizer: torch.optim.Optimizer) -> None:
    with launching_on_cpu():
        optimizer.step()


@pytest.mark.parametrize("zero", range(4))
def test_the_kernel_steps_each_run_once_and_writes_its_copy(
    zero: int, as_on_a_gpu: list[dict[str, Any]]
) -> None:
    model, optimizer = sharded(our_adamw, zero, torch.bfloat16)
    expected, other = sharded(torch_adamw, zero, torch.bfloat16)
    for step in range(3):
        losses = [loss_of(m, batch(step)) for m in (model, expected)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.backward()
        as_on_a_gpu.clear()
        step_launching(optimizer)
        other.step()
        assert len(as_on_a_gpu) == 8, "a run for each of four units and two groups"
        copies = [call["compute"] for call in as_on_a_gpu]
        assert all((copy is None) == (zero == 3) for copy in copies)
        for opt in (optimizer, other):
            opt.zero_grad()
    for name, value in full_params(model).items():
        torch.testing.assert_close(
            value, full_params(expected)[name], rtol=1e-2, atol=1e-3, msg=name
        )


def test_the_kernel_updates_plain_parameters_to_its_definition(
    as_on_a_gpu: list[dict[str, Any]],
) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(7, 5))
    expected = [param.detach().clone().view(-1), torch.zeros(35), torch.zeros(35)]
    options = {"betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.3, "maximize": True}
    optimizer = ss.AdamW([param], lr=torch.tensor([0.02]), **options)
    for step in range(1, 4):
        param.grad = torch.randn(7, 5)
        version = param._version
        step_launching(optimizer)
        assert param._version > version, "graphs from before would not notice"
        with torch.no_grad():
            count = torch.tensor(step)
            grad, rate = param.grad.view(-1), torch.tensor(0.02)
            op.flat_adamw_(expected[0], grad, *expected[1:], rate, count, **options)
    assert len(as_on_a_gpu) == 3
    assert torch.equal(param.detach().view(-1), expected[0])
    assert torch.equal(optimizer.state[param]["exp_avg"].view(-1), expected[1])


def test_what_the_kernel_does_not_take_goes_to_torchs_operator(
    as_on_a_gpu: list[dict[str, Any]],
) -> None:
    strided = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    twins = [
        [nn.Parameter(strided.clone()), nn.Parameter(torch.ones(5).bfloat16())] for _ in range(2)
    ]
    twins[0].append(nn.Parameter(torch.ones(6)))
    optimizers = ss.AdamW(twins[0]), torch.optim.AdamW(twins[1], fused=True)
    for twin in twins:
        for param in twin:
            param.grad = torch.full_like(param, 0.5)
    step_launching(optimizers[0])
    optimizers[1].step()
    assert len(as_on_a_gpu) == 1
    for ours, theirs in zip(twins[0], twins[1], strict=False):
        assert torch.equal(ours, theirs)


def test_a_gradient_scaler_reaches_the_kernel(as_on_a_gpu: list[dict[str, Any]]) -> None:
    model, optimizer = sharded(our_adamw, 1, torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = full_params(model)
    for step, overflows in enumerate((True, False)):
        scaler.scale(loss_of(model, batch(step))).backward()
        if overflows:
            model.head.weight.grad.fill_(float("inf"))
        with launching_on_cpu():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(value, before[name]) for name, value in full_params(model).items()]
        assert all(same) if overflows else not any(same)
        assert as_on_a_gpu[-1]["factor"] == (1 / 8 if overflows else 1 / 4)
    assert all(state["step"] == 1 for state in optimizer.state.values())
