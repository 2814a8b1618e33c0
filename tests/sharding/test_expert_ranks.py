"""Experts that only some ranks hold: whose gradients are summed, and what is decided together."""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks

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
    for param, mark in zip(module.parameters(), itertools.cycle([False, 0]), strict=False):
        param.allreduce = mark  # as theirs: what counts as false
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


# ZeRO level, what is done over instances, and by what sums are divided.
LEVELS = [(0, "no_shard", None), (1, "no_shard", 1.0), (3, "no_shard", None), (1, "optim", None)]


def _scales(rank: int, world_size: int) -> list[str]:
    wrong = []
    for layout in LAYOUTS:
        if layout.instances * max(layout.tp, layout.ep * layout.etp) > world_size:
            continue
        options = layout.options(world_size)
        dense = range(rank % layout.tp, world_size, layout.tp)
        holders = range(rank % (layout.ep * layout.etp), world_size, layout.ep * layout.etp)
        for zero, strategy, factor in LEVELS:
            if strategy == "optim" and layout.instances == 1:
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
    (Layout(ep=2), 0, {}),
    (Layout(ep=2), 1, {}),
    (Layout(ep=2), 3, {}),
    (Layout(ep=4), 3, {}),
    (Layout(ep=2, instances=2), 1, {}),
    (Layout(ep=2, instances=2), 3, {"outer_dp_sharding_strategy": "optim"}),
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
    for layout, zero, more in CASES:
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
        for step in range(2):
            # Two backwards, of which the first is only added up.
            for micro, context in ((0, ss.no_sync(model)), (1, contextlib.nullcontext())):
                sum(losses(plain, range(world_size), 2 * step + micro)).div(world_size).backward()
                with context:
                    losses(model, range(rank, rank + 1), 2 * step + micro)[0].backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            got = ss.clip_grad_norm_(model, 0.1)
            torch.testing.assert_close(got, expected)
            twin.step(), optimizer.step()
            twin.zero_grad(), optimizer.zero_grad()
        state = plain.state_dict()
        for name, param in model.named_parameters():
            named = name.replace("experts.0", f"experts.{number}")
            torch.testing.assert_close(param.full_tensor(), state[named])
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


def spoil(weight: Tensor, rank: int) -> None:
    """Put NaN into the gradient on all ranks that share `weight` with `rank`, and no others."""
    if rank in dist.get_process_group_ranks(weight.group):
        weight.grad.to_local().fill_(torch.nan)


def _skips(options: dict[str, Any], part: str) -> list[Any]:
    """What a step does by our policy where a gradient of `part` is not finite on some ranks: which
    parameters stay as they were, and how many steps were skipped.
    """
    model = Both()
    policy = ss.MixedPrecisionPolicy(nonfinite_grads="skip")
    ss.fully_shard(model, zero_dp_strategy=1, mixed_precision_policy=policy, **options)
    optimizer = ss.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = whole(model)
    model(torch.ones(3, 8)).backward()
    spoil(getattr(model, part).weight, 1)
    optimizer.step()
    stayed = [torch.equal(*pair) for pair in zip(whole(model), before, strict=True)]
    return [stayed, ss.skipped_steps(model)]


def _scales_down(options: dict[str, Any], part: str) -> list[Any]:
    """The same of one scaler for two optimizers: what stays, and the next scale."""
    model = Both()
    ss.fully_shard(model, zero_dp_strategy=0, **options)
    optimizers = [
        ss.fully_shard_optimizer(torch.optim.SGD(part.parameters(), lr=0.1))
        for part in (model.dense, model.expert)
    ]
    before = whole(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(3, 8))).backward()
    spoil(getattr(model, part).weight, 1)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    stayed = [torch.equal(*pair) for pair in zip(whole(model), before, strict=True)]
    return [stayed, scaler.get_scale()]


def _joined(options: dict[str, Any], rank: int, world_size: int) -> None:
    """Two models of half the ranks each, with experts that all ranks share."""
    for zero in (0, 1, 3):
        plain = [Both() for _ in range(2)]
        nn.init.constant_(plain[1].dense.weight, 0.25)
        plain[1].expert = plain[0].expert
        model = copy.deepcopy(plain[rank % 2])
        marked(model.expert)  # which a copy is not
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        may_differ = zero == 3
        ss.fully_shard(
            model, optimizer, zero_dp_strategy=zero, ranks_may_differ=may_differ, **options
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
        with ss.gathered(model, write=True), torch.no_grad():
            model.expert.weight.mul_(2)
        expected = plain[0].expert.weight.detach() * 2
        torch.testing.assert_close(model.expert.weight.full_tensor().detach(), expected)
    with pytest.raises(ValueError, match="experts whose ranks are among"):
        ss.clip_grad_norm_(model, 1.0)


def _decide(rank: int, world_size: int) -> dict[str, Any]:
    apart = Layout(ep=2).options(world_size)
    joined = Layout(tp=2).options(world_size)
    _joined(joined, rank, world_size)
    parts = (apart, "expert"), (joined, "dense")
    return {
        "skipped": [_skips(*one) for one in parts],
        "scaled": [_scales_down(*one) for one in parts],
    }


def test_steps_are_left_out_by_all_ranks_of_a_model() -> None:
    # A scaler leaves out the step of the one optimizer, but the scale is one for all.
    experts, dense = [[False, False, True, True], 2.0], [[True, True, False, False], 2.0]
    expected = {"skipped": [[[True] * 4, 1]] * 2, "scaled": [experts, dense]}
    assert run_on_ranks(_decide, 4) == [expected] * 4


# ---- what is refused


def _refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = Layout(ep=2).options(world_size)
    crossed = {
        "device_mesh": DeviceMesh("cpu", torch.arange(4).view(2, 2).T, mesh_dim_names=("x", "y")),
        "dp_shard_dim": "x",
        "expt_device_mesh": options["expt_device_mesh"]["shard"],
    }
    mesh = {key: value for key, value in options.items() if key != "expt_device_mesh"}
    unmarked, wider = Both(), Both()
    del unmarked.expert.weight.allreduce
    if rank % 2:
        wider.expert = marked(nn.Linear(8, 8 + rank))
    with torch.device("meta"):
        on_meta = Both()
    model = Both()
    ss.fully_shard(model, zero_dp_strategy=1, **options)
    model(torch.ones(2, 8)).backward()
    weight = model.expert.weight
    full = StateDictOptions(full_state_dict=True)

    def save_with_torch() -> None:
        dcp.save({"weight": weight}, checkpoint_id=f"{folder}/dcp{rank}", no_dist=True)

    actions: dict[str, Any] = {
        "no mesh": lambda: ss.fully_shard(Both(), **mesh),
        "a mesh on some ranks": lambda: ss.fully_shard(Both(), **(options if rank else mesh)),
        "no marks": lambda: ss.fully_shard(nn.Linear(2, 2), **options),
        "marks on some ranks": lambda: ss.fully_shard(Both() if rank else unmarked, **options),
        "other shapes": lambda: ss.fully_shard(wider, **options),
        "ranks that cross": lambda: ss.fully_shard(Both(), **crossed),
        "no such dimension": lambda: ss.fully_shard(
            Both(), **{**options, "expt_device_mesh": options["expt_device_mesh"]["shard"]}
        ),
        "no mesh at all": lambda: ss.fully_shard(Both(), **{**mesh, "expt_device_mesh": 2}),
        "symmetric": lambda: ss.fully_shard(Both(), **options, symmetric_memory="auto"),
        "meta": lambda: ss.fully_shard(on_meta, **options, init_model_with_meta_device=True),
        "checkpoint": lambda: ss.save_checkpoint(f"{folder}/ours", model),
        "safetensors": lambda: ss.save_safetensors(f"{folder}/st", model),
        "full state": lambda: ss.full_state_dict(model),
        "torch's state": lambda: get_model_state_dict(model, options=full),
        "torch's checkpoint": save_with_torch,
        "torch's norm": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "decision of one rank": lambda: weight.grad.isnan().any(),
    }
    found = {}
    for name, action in actions.items():
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - DCP's are no exceptions
            found[name] = f"{type(error).__name__}: {error}"
    # With the same experts on all ranks nothing is in the way of checkpoints.
    alike = Both()
    ss.fully_shard(alike, **Layout().options(world_size))
    ss.save_checkpoint(f"{folder}/alike", alike)
    with torch.no_grad():
        alike.expert.weight.zero_()
    ss.load_checkpoint(f"{folder}/alike", alike)
    assert torch.equal(alike.expert.weight.full_tensor(), Both().expert.weight)
    # Nothing of the above has changed the model, or left a rank behind.
    assert weight.full_tensor().shape == (8, 8)
    ss.clip_grad_norm_(model, 1.0)
    return found


REFUSALS = {
    "no mesh": "ValueError: expt_device_mesh: expected the mesh",
    "a mesh on some ranks": "ValueError: device_mesh: expected the same dimensions on every rank",
    "no marks": "ValueError: expt_device_mesh: expected parameters that are marked",
    "marks on some ranks": "torch.float32, expert",
    "other shapes": "on rank 0 ((8, 8), 'torch.float32, expert', True)",
    "ranks that cross": "ValueError: expt_device_mesh: expected expert ranks that are all among",
    "no such dimension": "ValueError: expt_device_mesh: dp_outer_dim: expected one of",
    "no mesh at all": "TypeError: expt_device_mesh: expected a DeviceMesh of torch, got int",
    "symmetric": "ValueError: symmetric_memory: expected 'off' with experts",
    "meta": "'expert.weight' is an expert's (allreduce=False) and on the meta device",
    "checkpoint": "ValueError: module: expected parameters with one value on all ranks",
    "safetensors": "ValueError: module: expected parameters with one value on all ranks",
    "full state": "RuntimeError: full_state_dict: expected a tensor with one value",
    "torch's state": "RuntimeError: full_state_dict=True: expected a tensor with one value",
    "torch's checkpoint": "torch.distributed.checkpoint: expected a tensor with one value",
    "torch's norm": "RuntimeError: aten.linalg_vector_norm.default: expected a tensor with one",
    "decision of one rank": "expected a tensor with one value on all ranks",
}


def test_what_experts_cannot_do_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for found in run_on_ranks(_refusals, 4, str(tmp_path)):
        assert list(found) == list(REFUSALS)
        for name, text in REFUSALS.items():
            assert text in found[name], (name, found[name])
