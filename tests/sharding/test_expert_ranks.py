"""Experts that only some ranks hold: whose gradients are summed, and what is decided together."""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.warned import warned

NAMES = ("outer", "shard", "model")


def mesh_of(world_size: int, instances: int, apart: int) -> DeviceMesh:
    """Every `apart`-th rank in one group, in as many instances of neighbours."""
    ranks = torch.arange(world_size).view(instances, -1, apart)
    return DeviceMesh("cpu", ranks, mesh_dim_names=NAMES)[NAMES[:2]]


@dataclass(frozen=True)
class Layout:
    """Sizes as Megatron calls them."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    instances: int = 1

    def options(self, world_size: int) -> dict[str, Any]:
        """Those of `fully_shard`; collective."""
        return {
            "device_mesh": mesh_of(world_size, self.instances, self.tp),
            "expt_device_mesh": mesh_of(world_size, self.instances, self.ep * self.etp),
            "dp_shard_dim": "shard",
            "dp_outer_dim": "outer",
        }


def marked(module: nn.Module) -> nn.Module:
    """`module` as an expert."""
    for param in module.parameters():
        param.allreduce = False
    return module


# ---- scales of gradients


class Constant(nn.Module):
    """Every element of a gradient is `scale`, of dense parameters and of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.ones(300))
        self.expert = nn.Parameter(torch.ones(70, 5))
        self.expert.allreduce = False

    def forward(self, scale: Tensor) -> Tensor:
        return (self.dense.sum() + self.expert.sum()) * scale


LAYOUTS = [
    Layout(),
    Layout(ep=2),
    Layout(ep=2, etp=2),
    Layout(instances=2),
    Layout(etp=2, instances=2),
    Layout(tp=2),
    Layout(tp=2, instances=2),
    Layout(tp=2, ep=4),
    Layout(tp=4, ep=2),
]


def _scales(rank: int, world_size: int) -> list[str]:
    wrong = []
    for layout in LAYOUTS:
        if layout.instances * max(layout.tp, layout.ep * layout.etp) > world_size:
            continue
        options = layout.options(world_size)
        dense = range(rank % layout.tp, world_size, layout.tp)
        holders = range(rank % (layout.ep * layout.etp), world_size, layout.ep * layout.etp)
        outer = ("no_shard", "optim") if layout.instances > 1 else ("no_shard",)
        for zero, strategy, factor in itertools.product((0, 1, 3), outer, (None, 1.0)):
            if strategy == "optim" and not zero:
                continue
            model = Constant()
            ss.fully_shard(
                model,
                zero_dp_strategy=zero,
                outer_dp_sharding_strategy=strategy,
                gradient_divide_factor=factor,
                **options,
            )
            model(torch.tensor(rank + 1.0)).backward()
            divisor = len(dense) if factor is None else factor
            for name, ranks in (("dense", dense), ("expert", holders)):
                expected = sum(one + 1.0 for one in ranks) / divisor
                grad = getattr(model, name).grad.full_tensor()
                if not torch.equal(grad, torch.full_like(grad, expected)):
                    wrong.append(f"{layout} {zero} {factor} {name}: {grad.unique()}, {expected}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_are_summed_over_their_holders_and_divided_as_dense_parameters(
    world_size: int,
) -> None:
    assert run_on_ranks(_scales, world_size) == [[]] * world_size


# ---- a mixture of experts, beside one that a single process holds

WIDTH, BATCH = 12, 5
SGD = {"lr": 0.5, "momentum": 0.9}


class Swap(torch.autograd.Function):
    """Part i of `x` [ranks of `group`, ...] to rank i, and from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, sent = group, x.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Swap.forward(ctx, grad, ctx.group), None


class Expert(nn.Module):
    """One of `count`; `number` is a buffer that its ranks alone have in common."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)
        self.register_buffer("number", torch.tensor(number))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """All `experts`, or this rank's one of them, the tokens being sent to where others are."""

    group: dist.ProcessGroup | None = None

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Expert(number) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x), dim=-1).T.unsqueeze(-1)
        if self.group is None:
            outputs = torch.stack([expert(x) for expert in self.experts])
        else:
            tokens = Swap.apply(x.expand(len(shares), *x.shape), self.group)
            outputs = Swap.apply(self.experts[0](tokens), self.group)
        return x + (shares * outputs).sum(0)

    def keep(self, number: int, group: dist.ProcessGroup) -> None:
        """One expert alone; `group`: with a rank for each."""
        self.experts = nn.ModuleList([marked(self.experts[number])])
        self.group = group


def mixtures(count: int) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Mixture(count) for _ in range(2)))


def losses(model: nn.Module, ranks: range, step: int) -> list[Tensor]:
    """One for each rank's batch."""
    found = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        found.append(model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean())
    return found


CASES = [
    (Layout(ep=2), (0, 1, 3), {}),
    (Layout(ep=4), (0, 3), {}),
    (Layout(ep=2, instances=2), (1,), {}),
    (Layout(ep=2, instances=2), (1, 3), {"outer_dp_sharding_strategy": "optim"}),
]


def _train(rank: int, world_size: int) -> list[list[int]]:
    """Beside a plain model that one process trains. Returns the orders of exchanges."""
    groups = {
        count: [
            dist.new_group(list(range(start, start + count)))
            for start in range(0, world_size, count)
        ][rank // count]
        for count in (2, 4)
    }
    orders = []
    options = {layout: layout.options(world_size) for layout, *_ in CASES}
    for layout, zero, more in [
        (layout, zero, more) for layout, levels, more in CASES for zero in levels
    ]:
        plain = mixtures(layout.ep)
        model, number = copy.deepcopy(plain), rank % layout.ep
        for mixture in model[1:]:
            mixture.keep(number, groups[layout.ep])
        if rank >= layout.ep:
            nn.init.ones_(model[1].experts[0].up.weight)  # another rank's counts
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        ss.fully_shard(
            model,
            optimizer,
            zero_dp_strategy=zero,
            fsdp_unit_modules=[Mixture],
            **more,
            **options[layout],
        )
        assert [int(part.experts[0].number) for part in model[1:]] == [number] * 2
        twin = torch.optim.SGD(plain.parameters(), **SGD)
        for step in range(3):
            # Two backwards, of which the first is only added up.
            for micro, context in ((0, ss.no_sync(model)), (1, contextlib.nullcontext())):
                sum(losses(plain, range(world_size), 2 * step + micro)).div(world_size).backward()
                with context:
                    losses(model, range(rank, rank + 1), 2 * step + micro)[0].backward()
            state = dict(plain.named_parameters())
            for name, param in model.named_parameters():
                named = name.replace("experts.0", f"experts.{number}")
                torch.testing.assert_close(
                    param.grad.full_tensor(),
                    state[named].grad,
                    msg=lambda m, n=name: f"{layout} {zero} {step} {n}: {m}",
                )
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            got = ss.clip_grad_norm_(model, 0.1)
            torch.testing.assert_close(got, expected)
            twin.step(), optimizer.step()
            twin.zero_grad(), optimizer.zero_grad()
        state = plain.state_dict()
        for name, param in model.named_parameters():
            named = name.replace("experts.0", f"experts.{number}")
            torch.testing.assert_close(
                param.full_tensor(), state[named], msg=lambda m: f"{name}: {m}"
            )
        orders.append(runtime_of(model).exchange_order.indices)
    return orders


def test_experts_train_as_in_one_process() -> None:
    orders = run_on_ranks(_train, 4)
    assert orders == [orders[0]] * 4


# ---- what is decided together


class Both(nn.Module):
    """Two matrices, of which the second is an expert's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense, self.expert = nn.Linear(8, 8), marked(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.dense(x))).square().mean()


def whole(model: nn.Module) -> list[Tensor]:
    return [param.detach().full_tensor() for param in model.parameters()]


def _skips(options: dict[str, Any], rank: int, bad: int) -> list[Any]:
    """What a step does after a gradient of rank `bad` that is not finite: with our policy, then
    with one scaler for an optimizer of the dense parameters and one of the experts'.
    """
    found: list[Any] = []
    policy = ss.MixedPrecisionPolicy(nonfinite_grads="skip")
    x = torch.full((3, 8), torch.inf if rank == bad else 1.0)
    for policy, zero in ((policy, 1), (None, 0)):
        model = Both()
        ss.fully_shard(model, zero_dp_strategy=zero, mixed_precision_policy=policy, **options)
        if policy is not None:
            with torch.no_grad():
                model.expert.weight.mul_(1)  # all ranks write, to what is theirs
        parts = (
            [model.parameters()]
            if policy
            else [model.dense.parameters(), model.expert.parameters()]
        )
        optimizers = [ss.fully_shard_optimizer(torch.optim.SGD(part, lr=0.1)) for part in parts]
        before = whole(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=policy is None)
        if policy is None:
            x = torch.ones(3, 8)
        scaler.scale(model(x)).backward()
        if policy is None and rank == bad:
            model.expert.weight.grad.to_local().fill_(torch.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        stayed = [torch.equal(*pair) for pair in zip(whole(model), before, strict=True)]
        found += [stayed, ss.skipped_steps(model), scaler.get_scale()]
    return found


def _joined(options: dict[str, Any], rank: int, world_size: int) -> None:
    """Two models of half the ranks, with experts that all share, at every level."""
    for zero in (0, 1, 3):
        torch.manual_seed(rank % 2)
        plain = [Both() for _ in range(2)]
        nn.init.constant_(plain[1].dense.weight, 0.25)
        plain[1].expert = plain[0].expert
        model = copy.deepcopy(plain[rank % 2])
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        ss.fully_shard(
            model, optimizer, zero_dp_strategy=zero, ranks_may_differ=zero == 3, **options
        )
        twin = torch.optim.SGD(nn.ModuleList(plain).parameters(), **SGD)
        for step in range(2):
            for one in range(world_size):
                (plain[one % 2](torch.full((2, 8), one + step + 1.0)) * 2 / world_size).backward()
            model(torch.full((2, 8), rank + step + 1.0)).backward()
            twin.step(), optimizer.step()
            twin.zero_grad(), optimizer.zero_grad()
        for got, expected in zip(whole(model), plain[rank % 2].parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach())
        with pytest.raises(ValueError, match="experts whose ranks are among"):
            ss.clip_grad_norm_(model, 1.0)
        with ss.gathered(model, write=True):
            model.expert.weight.mul_(2)
        torch.testing.assert_close(whole(model)[2], plain[0].expert.weight.detach() * 2)


def _decide(rank: int, world_size: int) -> list[Any]:
    apart = Layout(ep=2).options(world_size)
    joined = Layout(tp=2).options(world_size)
    _joined(joined, rank, world_size)
    return _skips(apart, rank, bad=1) + _skips(joined, rank, bad=1)


def test_steps_are_left_out_by_all_ranks_of_a_model() -> None:
    expected = [[True] * 4, 1, 1.0, [True, True, False, False], 0, 2.0]
    for found in run_on_ranks(_decide, 4):
        print(found)
