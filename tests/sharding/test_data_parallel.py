"""`DistributedDataParallel` over `fully_shard`: beside torch's own, and what it must not do."""

import copy
import dataclasses
import math
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import sidestream as ss
from sidestream.sharding.data_parallel import DistributedDataParallel
from sidestream.sharding.data_parallel_base import DataParallelBase
from sidestream.sharding.data_parallel_config import DistributedDataParallelConfig
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.fused_gradients import main_grad
from sidestream.sharding.gradient_checks import GradientChecks
from sidestream.sharding.process_groups import ProcessGroupCollection, initialize_model_parallel
from sidestream.sharding.trace import Kind
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.warned import warned

WIDTH = 96
LAYERS = 6
# Torch's buckets are closed by bytes, in the order of the gradients: two layers each.
BUCKET_MIB = 2 * (WIDTH * WIDTH + WIDTH) * 4 / 2**20
STEPS = 10


class Net(nn.Module):
    """Layers in a row, and one that nobody calls."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _net(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _config(**options: Any) -> DistributedDataParallelConfig:
    options = {"overlap_grad_reduce": True, "bucket_mib": BUCKET_MIB, **options}
    return DistributedDataParallelConfig(**options)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def _bound(model: DistributedDataParallel) -> torch.optim.Optimizer:
    return ss.fully_shard_optimizer(_sgd(model))


def _grads(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.module.named_parameters()}


# ---- beside torch's own

OPTIONS = {
    "zero 0": {},
    "zero 1": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "no overlap": {"overlap_grad_reduce": False},
    "two instances": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
}


def _train_beside_torch(rank: int, world_size: int) -> dict[str, Any]:
    torch_model = TorchDDP(_net(), bucket_cap_mb=BUCKET_MIB)
    sent = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().numel())
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return allreduce_hook(None, bucket)

    torch_model.register_comm_hook(None, hook)
    chosen = {
        name: options
        for name, options in OPTIONS.items()
        if world_size % options.get("num_distributed_optimizer_instances", 1) == 0
    }
    models = {
        name: DistributedDataParallel(_net(), _config(**options))
        for name, options in chosen.items()
    }
    optimizers = {"torch": _sgd(torch_model)}
    optimizers |= {name: _bound(model) for name, model in models.items()}
    worst: dict[str, float] = dict.fromkeys(models, 0.0)
    calls: dict[str, list[int]] = {name: [] for name in models}
    torch_calls = []
    for step in range(STEPS):
        batch = _batch(step, rank)
        sent.clear()
        torch_model(batch).square().mean().backward()
        torch_calls.append(len(sent))
        expected = {name: p.grad for name, p in torch_model.module.named_parameters()}
        for name, model in models.items():
            traffic = runtime_of(model.module).collectives.traffic
            traffic.reset()
            model(batch).square().mean().backward()
            model.finish_grad_sync()
            model.finish_grad_sync()  # as often as one likes
            calls[name].append(traffic.calls["exchange"])
            for param, grad in _grads(model).items():
                gap = (grad - expected[param]).abs().max() / expected[param].abs().max()
                worst[name] = max(worst[name], float(gap))
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(torch_model.module.named_parameters())
    equal = {
        name: all(
            torch.equal(p.full_tensor(), weights[key]) for key, p in model.module.named_parameters()
        )
        for name, model in models.items()
    }
    keys = {name: list(model.state_dict()) for name, model in models.items()}
    return {"worst": worst, "equal": equal, "calls": calls, "torch": torch_calls, "keys": keys}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4], ids="{} ranks".format)
def test_trains_as_torch_ddp_does(world_size):
    for found in run_on_ranks(_train_beside_torch, world_size):
        eps = torch.finfo(torch.float32).eps
        for name, worst in found["worst"].items():
            if world_size <= 2:
                # Halves are exact, and a sum of two has no order.
                assert worst == 0 and found["equal"][name], (name, worst)
            else:
                # Another order of additions, and weights that drift with it for ten steps.
                assert worst < 200 * eps, (name, worst)
        if world_size > 1:
            # From its second backward on torch's buckets follow the gradients, as ours always do.
            steady = found["torch"][1:]
            assert set(steady) == {LAYERS // 2}
            assert found["calls"]["zero 0"][1:] == found["calls"]["zero 1"][1:] == steady
            assert found["calls"]["zero 0"][0] == LAYERS // 2
            assert found["calls"]["no overlap"] == [LAYERS // 2] * STEPS
        for names in found["keys"].values():
            assert names == list(_net().state_dict())


# ---- buckets, overlap, unused parameters


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _first_step(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = DistributedDataParallel(_net(), _config())
    runtime = runtime_of(model.module)
    found["buckets"] = [unit.spec.names for unit in runtime.units]
    runtime.trace.steps = []
    model(_batch(0, rank)).square().mean().backward()
    found["trace"] = runtime.trace.steps
    reference = _grads(model)

    torch.manual_seed(3)
    unused = DistributedDataParallel(Unused(), _config())
    unused(_batch(0, rank)).square().mean().backward()
    grads = _grads(unused)
    found["unused is zero"] = not grads["unused.weight"].any()
    found["others are the same"] = all(torch.equal(grads[k], v) for k, v in reference.items())

    torch.manual_seed(3)
    shared = Net()
    shared.layers[0].weight.shared_embedding = True
    for name, options in {
        "shared": {},
        "counted": {"bucket_mib": None, "num_buckets": 2},
        "frozen": {"bucket_mib": None, "num_buckets": 1},
        "elements": {"bucket_mib": None, "bucket_size": 3 * (WIDTH * WIDTH + WIDTH) - 1},
        "one": {"bucket_mib": None},
        "padded": {"pad_buckets_for_high_nccl_busbw": True},
        "no overlap": {"bucket_mib": None, "overlap_grad_reduce": False},
    }.items():
        net = shared if name == "shared" else _net()
        net.layers[1:].requires_grad_(name != "frozen")
        built = DistributedDataParallel(net, _config(**options))
        units = runtime_of(built.module).units
        found[name] = [(unit.spec.layout.numel, len(unit.spec.names)) for unit in units]
    return found


def test_first_step_overlaps_and_buckets_are_as_asked_for():
    found, other = run_on_ranks(_first_step, 2)
    assert found == other
    layer = ("layers.{0}.weight", "layers.{0}.bias")
    two = [tuple(t.format(i) for i in pair for t in layer) for pair in ((0, 1), (2, 3), (4, 5))]
    assert found["buckets"] == two
    # Each bucket leaves as soon as it is complete, in the first backward too.
    order = [step for step in found["trace"] if step[0] in (Kind.BACKWARD, Kind.EXCHANGE)]
    assert order == [(kind, u) for u in (2, 1, 0) for kind in (Kind.BACKWARD, Kind.EXCHANGE)]
    assert found["unused is zero"] and found["others are the same"]

    assert [count for _, count in found["shared"]] == [1, 3, 4, 4]
    assert [count for _, count in found["counted"]] == [6, 6]
    assert [count for _, count in found["frozen"]] == [2, 10]  # few trained ones cut no others
    assert [count for _, count in found["elements"]] == [6, 6]
    assert (
        [count for _, count in found["one"]] == [12] == [count for _, count in found["no overlap"]]
    )
    assert all(numel % 2**16 == 0 for numel, _ in found["padded"])


# ---- gradients that wait, scaling, clearing


def _wrong_factors(model: DataParallelBase) -> None:
    for factor in (torch.ones(2), torch.ones(0), "2", None):
        with pytest.raises((TypeError, ValueError), match="factor: expected"):
            model.scale_gradients(factor)


def _calls_from_inside(model: DistributedDataParallel, rank: int) -> None:
    inner = model.module.layers[1]
    forward, backward = inner.register_forward_hook, inner.register_full_backward_hook
    for register, call in (
        (forward, model.broadcast_params),
        (backward, model.broadcast_params),
        (backward, lambda: model.scale_gradients(2)),
    ):
        handle = register(lambda *_, call=call: call())
        with pytest.raises(RuntimeError, match=r"expected .* from inside"):
            model(_batch(0, rank)).square().mean().backward()
        handle.remove()


def _refuses_tokens(model: DistributedDataParallel) -> bool:
    with pytest.raises(ValueError, match="averages gradients over the ranks, got 3"):
        ss.finalize_model_grads(model, 3)
    return True


def _accumulate(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    expected = _net()
    for step in range(2):
        for other in range(world_size):
            (expected(_batch(step, other)).square().mean() / world_size).backward()
    want = {name: p.grad for name, p in expected.named_parameters()}

    def close(grads: dict[str, Tensor], factor: float = 1.0) -> bool:
        return all(
            torch.allclose(grads[k], factor * v, rtol=1e-5, atol=1e-7) for k, v in want.items()
        )

    for name, options in {
        "overlap": {},
        "no overlap": {"overlap_grad_reduce": False},
        "zero 1": {"overlap_grad_reduce": False, "use_distributed_optimizer": True},
    }.items():
        model = DistributedDataParallel(_net(), _config(**options))
        optimizer = _bound(model)
        with model.no_sync():
            for step in range(2):
                model(_batch(step, rank)).square().mean().backward()
        with pytest.raises(RuntimeError, match="accumulated under no_sync"):
            model.scale_gradients(0.5)
        with pytest.raises(RuntimeError, match="accumulated under no_sync"):
            optimizer.step()
        model.start_grad_sync()
        _wrong_factors(model)
        model.finish_grad_sync()
        found[name] = close(_grads(model))
        model.scale_gradients(torch.tensor([[0.25]]))
        found[f"{name}, scaled"] = close(_grads(model), 0.25)
        model.zero_grad_buffer()
        found[f"{name}, cleared"] = all(p.grad is None for p in model.parameters())
        # What was cleared does not come back, also of a sum that waited.
        with model.no_sync():
            model(_batch(7, rank)).square().mean().backward()
        model.zero_grad_buffer()
        for step in range(2):
            model(_batch(step, rank)).square().mean().backward()
        model.finish_grad_sync()
        found[f"{name}, again"] = close(_grads(model))
        optimizer.step()
        found[f"{name}, divided twice"] = _refuses_tokens(model)

    _calls_from_inside(model, rank)
    per_token = DistributedDataParallel(_net(), _config(calculate_per_token_loss=True))
    for step in range(2):
        per_token(_batch(step, rank)).square().mean().backward()
    found["sums"] = close(_grads(per_token), world_size)

    before = {k: p.full_tensor() for k, p in per_token.module.named_parameters()}
    if rank == 1:
        with torch.no_grad():
            for param in per_token.parameters():
                param.mul_(3)  # a replica that went its own way
    per_token.broadcast_params()
    after = {k: p.to_local().detach().view(p.shape) for k, p in per_token.module.named_parameters()}
    found["broadcast"] = all(torch.equal(after[k], v) for k, v in before.items())
    return found


def test_gradients_wait_are_scaled_and_are_cleared():
    for found in run_on_ranks(_accumulate, 2):
        assert all(found.values()), found


# ---- checks


def _checks(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def step(model: DistributedDataParallel, x: Tensor) -> str | None:
        try:
            model(x).square().mean().backward()
            model.finish_grad_sync()
        except ss.NonFiniteGradientError as error:
            assert error.ranks["layers.0.weight"] == (1,)
            return f"{error.step}: {error}"
        finally:
            model.zero_grad_buffer()
        return None

    x = _batch(0, rank)
    bad = torch.where(torch.arange(WIDTH) == rank - 1, math.nan, x)  # on rank 1 alone
    for name, options in {
        "zero 0": {},
        "zero 1": {"use_distributed_optimizer": True},
        "no overlap": {"overlap_grad_reduce": False},
    }.items():
        config = _config(check_for_nan_in_grad=True, **options)
        net = _net()
        net.layers[3].requires_grad_(False)
        model = DistributedDataParallel(net, config)
        found[name] = [step(model, x), step(model, bad), step(model, x)]

    late = DistributedDataParallel(_net(), _config())
    runtime = runtime_of(late.module)
    runtime.after_exchanges = GradientChecks(runtime, ["check_for_nan_in_grad"], is_late=True)
    found["late"] = [step(late, x), step(late, bad), step(late, x), step(late, x)]

    large = DistributedDataParallel(_net(), _config(check_for_large_grads=True))
    with warned() as texts:
        for factor in (1, 5, 0, 1):
            (large(x).square().mean() * factor).backward()
            large.zero_grad_buffer()
        found["usual"] = list(texts)
        (large(x).square().mean() * 51).backward()
        found["large"] = list(texts)
    return found


def test_gradients_that_are_not_finite_or_large_are_named():
    first, second = run_on_ranks(_checks, 2)
    for name in ("zero 0", "zero 1", "no overlap"):
        assert first[name] == second[name]
        good, text, after = first[name]
        assert good is None and after is None
        assert text.startswith("2: exchange 2: expected finite gradients, got NaN or infinity in")
        assert "'layers.0.weight' on rank 1" in text
    # Read after the next exchange, and told with its own number.
    assert first["late"] == second["late"]
    assert [text and text[:3] for text in first["late"]] == [None, None, "2: ", None]
    assert first["usual"] == second["large"] == []
    assert len(first["large"]) == 1
    assert "exchange 5: gradients are more than 10 times" in first["large"][0]
    assert "'layers.0.weight'" in first["large"][0]


# ---- parameters that are waited for where they are used


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)  # reads its out_proj
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reads_early = False

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_early:
            x = nn.functional.linear(x, self.head.weight)
        x = self.embedding(x)[None]
        x = self.attention(x, x, x, need_weights=False)[0]
        x = self.head(x)
        return nn.functional.linear(x, self.embedding.weight)  # tied, after its module's call


def _waits(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(3)
    net = Attention()
    plain = copy.deepcopy(net)
    options = {"use_distributed_optimizer": True, "bucket_mib": None, "bucket_size": 1}
    model = DistributedDataParallel(net, _config(overlap_param_gather=True, **options))
    optimizer, plain_optimizer = _bound(model), _sgd(plain)
    runtime = runtime_of(net)
    shown: list[list[str]] = []

    def look(*_: object) -> None:
        shown.append([u.spec.names[0] for u in runtime.units if u.faces.shows_full])

    for part in (net.embedding, net.attention, net.head):
        part.register_forward_hook(look)
    for step in range(3):
        model(_batch(step, rank)).square().mean().backward()
        for other in range(world_size):
            (plain(_batch(step, other)).square().mean() / world_size).backward()
        optimizer.step()
        if step == 1:
            model.start_param_sync()  # as a schedule does: forward finds them under way
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    found["shown"] = list(shown)
    expected = dict(plain.named_parameters())
    found["close"] = all(
        torch.allclose(p.full_tensor(), expected[name], rtol=1e-4, atol=1e-6)
        for name, p in net.named_parameters()
    )
    net.reads_early = True
    with pytest.raises(Exception, match=r"head\.weight"):
        model(_batch(0, rank))
    net.reads_early = False
    model(_batch(0, rank)).square().mean().backward()  # and it goes on
    return found


def test_parameters_are_waited_for_where_they_are_used():
    for found in run_on_ranks(_waits, 2):
        assert found["close"]
        # At first all at once; then each module waits for its own, and for its parts' that are not
        # called.
        seen = [[name.split(".")[0] for name in names] for names in found["shown"]]
        everything = ["embedding"] * 2 + ["attention"] * 4 + ["head"] * 2
        assert seen[:3] == [everything] * 3
        assert seen[3:] == [everything[:2], everything[:6], everything] * 2


# ---- kernels that add to the sum by themselves


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with main_grad(weight) as total:
            total += grad.T.float() @ x.float()
        return grad @ weight, None


class FusedNet(Net):
    def __init__(self, *, fused: bool, twice: bool = False) -> None:
        super().__init__()
        self.fused, self.twice = fused, twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.layers[: int(self.twice)]]:
            if self.fused:
                x = torch.tanh(_Fused.apply(x, layer.weight) + layer.bias)
            else:
                x = torch.tanh(x @ layer.weight.T + layer.bias)
        return x


def _fused(rank: int, world_size: int) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name, twice in {"once": False, "twice": True}.items():
        models = []
        for fused in (True, False):
            torch.manual_seed(3)
            models.append(DistributedDataParallel(FusedNet(fused=fused, twice=twice), _config()))
        for step in range(3):
            for model in models:
                with model.no_sync():
                    model(_batch(2 * step, rank)).square().mean().backward()
                model(_batch(2 * step + 1, rank)).square().mean().backward()
            ours, plain = map(_grads, models)
            found[f"{name} {step}"] = all(
                torch.allclose(ours[k], plain[k], rtol=1e-5, atol=1e-7) for k in plain
            )
            if step != 1:  # gradients of two steps add up
                for model in models:
                    model.zero_grad_buffer()
        # One backward alone has the same bits, as nothing is added to it.
        for model in models:
            model(_batch(9, rank)).square().mean().backward()
        ours, plain = map(_grads, models)
        if not twice:
            found["bits"] = all(torch.equal(ours[k], plain[k]) for k in plain)
    sharded = next(models[0].module.parameters())
    with pytest.raises(ValueError, match="main_grad: expected a parameter"), main_grad(sharded):
        pass
    return found


def test_fused_kernels_add_their_gradients():
    for found in run_on_ranks(_fused, 2):
        assert all(found.values()), found


# ---- what comes with the core: wires, state dicts, checkpoints


def _core(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name, dtype, options, policy in (
        ("bf16", torch.bfloat16, {}, {}),
        ("bf16 in fp32", torch.bfloat16, {"grad_reduce_in_fp32": True}, {"grad_wire": "fp32"}),
        ("mxfp8", torch.float32, {"grad_wire": "mxfp8"}, {"grad_wire": "mxfp8"}),
        ("both", torch.float32, *[{"grad_wire": "nvfp4", "param_wire": "fp8"}] * 2),
    ):
        model = DistributedDataParallel(_net().to(dtype), _config(**options))
        whole = _net().to(dtype)
        precision = ss.MixedPrecisionPolicy(**policy)
        ss.fully_shard(whole, zero_dp_strategy=0, mixed_precision_policy=precision)
        for net in (model, whole):
            net(_batch(0, rank).to(dtype)).square().mean().backward()
        expected = {key: p.grad.full_tensor() for key, p in whole.named_parameters()}
        grads = _grads(model)
        found[name] = all(torch.equal(grads[key], value) for key, value in expected.items())

    zero1 = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    models = [DistributedDataParallel(_net(), _config(**options)) for options in (zero1, {})]
    optimizers = [_bound(model) for model in models]
    for step in range(2):
        models[0](_batch(step, rank)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    ss.save_checkpoint(folder, models[0].module, optimizers[0])
    ss.load_checkpoint(folder, models[1].module, optimizers[1])
    state = models[0].state_dict_for_save_checkpoint()
    found["names"] = list(state) == list(_net().state_dict())
    third = DistributedDataParallel(_net(), _config())
    third.load_state_dict(state)
    found["loaded"] = all(
        torch.equal(third.state_dict()[key].full_tensor(), value.full_tensor())
        for key, value in state.items()
    )
    for model in models:
        model(_batch(5, rank)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    expected = {key: value.full_tensor() for key, value in models[0].state_dict().items()}
    found["goes on alike"] = all(
        torch.equal(value.full_tensor(), expected[key])
        for key, value in models[1].state_dict().items()
    )
    found["summary"] = len(ss.summary(models[0]).units) == LAYERS // 2
    found["norm"] = torch.equal(
        ss.clip_grad_norm_(models[0], 1e9), ss.clip_grad_norm_(models[0].module, 1e9)
    )
    return found


def test_wires_states_and_checkpoints_are_those_of_the_core(tmp_path):
    for found in run_on_ranks(_core, 2, str(tmp_path / "saved")):
        assert all(found.values()), found


def _tools_of_torch(rank: int, world_size: int) -> dict[str, bool]:
    from torch.distributed.checkpoint import state_dict as tools

    found: dict[str, bool] = {}
    plain = _net(layers=2)
    plain.module = nn.BatchNorm1d(3)  # of this name, and with buffers
    made = [DistributedDataParallel(copy.deepcopy(plain), _config()) for _ in range(2)]
    optimizers = [_bound(model) for model in made]
    made[0](_batch(0, rank)).square().mean().backward()
    optimizers[0].step()
    whole = tools.StateDictOptions(full_state_dict=True)
    for name, options in {"parts": None, "whole": whole}.items():
        model, state = tools.get_state_dict(made[0], optimizers[0], options=options)
        found[name] = {*model} == {*plain.state_dict()}
        found[f"state of {name}"] = {*state["state"]} == {*dict(plain.named_parameters())}
    tools.set_state_dict(
        made[1], optimizers[1], model_state_dict=model, optim_state_dict=state, options=whole
    )
    for one, optimizer in zip(made, optimizers, strict=True):
        one.zero_grad_buffer()
        one(_batch(1, rank)).square().mean().backward()
        optimizer.step()
    weights = [[p.full_tensor() for p in one.parameters()] for one in made]
    found["goes on alike"] = all(map(torch.equal, *weights))

    # Chunks of a pipeline in one module; and the same without wrappers.
    held, other = nn.ModuleList(made), nn.ModuleList(copy.deepcopy(plain) for _ in made)
    state = ss.full_state_dict(made[0])
    chunks = {f"{number}.{key}": value for number in (0, 1) for key, value in state.items()}
    found["names"] = list(held.state_dict()) == list(other.state_dict()) == list(chunks)
    for kind in ("named_parameters", "named_buffers"):
        names = [[name for name, _ in getattr(one, kind)()] for one in (held, other)]
        found[kind] = names[0] == names[1]
    model, state = tools.get_state_dict(held, optimizers, options=whole)
    found["chunks' state"] = {*state["state"]} == {*dict(other.named_parameters())}
    tools.set_state_dict(
        held, optimizers, model_state_dict=model, optim_state_dict=state, options=whole
    )
    held.load_state_dict({key: value + 1 for key, value in chunks.items()})
    other.load_state_dict(ss.full_state_dict(held))
    found["chunks"] = all(torch.equal(other.state_dict()[key], chunks[key] + 1) for key in chunks)
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.module\.layers\.1\.bias"):
        held.load_state_dict({key: chunks[key] for key in chunks if key != "1.layers.1.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.module\.more"):
        held.load_state_dict({**chunks, "0.more": torch.zeros(1)})
    return found


def test_torchs_own_tools_and_modules_around_find_the_names_of_the_module():
    for found in run_on_ranks(_tools_of_torch, 2):
        assert all(found.values()), found


# ---- experts and instances, over process groups


class Mixture(nn.Module):
    """Every gradient of a rank is the number that the rank's input has."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(3, 50))
        self.expert = nn.Parameter(torch.zeros(40))
        self.expert.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.dense.sum() + self.expert.sum())


KINDS = {
    "means": {"average_in_collective": True},
    "sums": {"calculate_per_token_loss": True},
    "zero 1": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "no overlap": {"overlap_grad_reduce": False},
}
# (tp, ep, etp): with tp 2 and etp 1 an expert is on more ranks than a dense parameter.
SIZES = [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1)]


def _mixture(sizes: tuple[int, int, int], instances: int, options: dict[str, Any]) -> list[Any]:
    tp, ep, etp = sizes
    groups = initialize_model_parallel(
        tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=instances,
    )
    first = float(dist.get_process_group_ranks(groups.expt_dp)[0])
    net = Mixture()
    net.expert.data.fill_(first if dist.get_rank() == first else 77.0)
    net.dense.sequence_parallel = True  # for tp, which the model knows from its groups
    config = _config(num_distributed_optimizer_instances=instances, **options)
    model = DistributedDataParallel(net, config, groups)
    optimizer = ss.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.tensor(2.0 ** dist.get_rank())).backward()
    ss.finalize_model_grads(model)
    found = [grad.unique().tolist() for grad in _grads(model).values()]
    optimizer.step()
    model.broadcast_params()  # of each set of ranks by itself: nothing changes
    found += [p.full_tensor().unique().tolist() for p in net.parameters()]

    expert = dist.get_process_group_ranks(groups.expt_dp)
    factor = 1.0 if options.get("calculate_per_token_loss") else 1 / groups.dp_cp.size()
    stage = dist.get_process_group_ranks(groups.tp_dp_cp)
    want = [factor * sum(2.0**rank for rank in ranks) for ranks in (stage, expert)]
    expected = [[value] for value in (*want, -want[0], first - want[1])]
    return [] if found == expected else [sizes, instances, options, found, expected]


def _mixtures(rank: int, world_size: int, all_kinds: bool) -> list[Any]:
    wrong = []
    for place, sizes in enumerate(SIZES):
        kinds = [*KINDS] if all_kinds else [[*KINDS][place % len(KINDS)]]
        wrong += [_mixture(sizes, 1, KINDS[kind]) for kind in kinds]
    for sizes in ((1, 1, 1), (1, 2, 1)):
        wrong.append(_mixture(sizes, 2, KINDS["zero 1"]))
    return [found for found in wrong if found]


@pytest.mark.parametrize(
    "all_kinds", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["each", "all kinds"]
)
def test_experts_have_their_own_ranks_and_the_factor_of_dense_ones(all_kinds):
    for wrong in run_on_ranks(_mixtures, 4, all_kinds):
        assert not wrong


# ---- one rank's model behind the same interface


def test_base_passes_all_on_to_its_module():
    base = DataParallelBase(_net())
    with base.no_sync():
        base(_batch(0, 0)).square().mean().backward()
    base.start_grad_sync()
    base.finish_grad_sync()
    before = base.module.layers[0].weight.grad.clone()
    _wrong_factors(base)
    base.scale_gradients(torch.tensor(0.5))
    assert torch.equal(base.module.layers[0].weight.grad, before / 2) and before.any()
    base.zero_grad_buffer()
    assert all(param.grad is None for param in base.parameters())
    state = base.state_dict_for_save_checkpoint()
    assert list(state) == list(base.state_dict()) == list(_net().state_dict())
    other = DataParallelBase(Net())
    other.load_state_dict(state)
    assert torch.equal(other.module.layers[2].bias, base.module.layers[2].bias)
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module"):
        DataParallelBase(3)


# ---- a job that torchrun describes, and nobody has joined yet


def _described_by_the_environment(rank: int, world_size: int, port: int) -> bool:
    job = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()})
    config = _config(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    model = DistributedDataParallel(_net(), config)
    return runtime_of(model.module).collectives.world_size == 2 == dist.get_world_size()


def test_instances_of_a_job_that_is_joined_here():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert run_on_ranks(_described_by_the_environment, 2, port, backend=None) == [True, True]


# ---- refusals


def _refused(rank: int, world_size: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def note(name: str, module: nn.Module, *args: Any, **options: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            DistributedDataParallel(module, _config(**options), *args)
        found[name] = str(caught.value)

    expert = _net()
    expert.layers[2].weight.allreduce = False
    note("expert", expert)
    zero1 = {"use_distributed_optimizer": True}
    note("instances", _net(), num_distributed_optimizer_instances=3, **zero1)
    pattern = {"param_name_patterns_for_fp32_local_accumulation": ("layers.0.*", "router.*")}
    note("pattern", _net(), **pattern)
    note("groups", _net(), object())
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    note("other instances", _net(), groups, num_distributed_optimizer_instances=2, **zero1)
    note("containers", nn.ModuleList([_net()]))
    made = initialize_model_parallel(groups=["dp_cp"])
    note("groups of some", _net(), made if rank == 1 else None)  # or each would wait in its own
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        note(name, _net(), **{name: rank == 1})  # or one would wait for the other in a check
    marked = _net()
    marked.layers[0].weight.shared_embedding = rank == 1
    note("marks", marked)  # or the buckets would differ
    with torch.device("meta"):
        note("meta", Net())
    late = DistributedDataParallel(_net(), _config())
    weight = late.module.layers[2].weight
    weight.allreduce = True  # as it is
    with pytest.raises(RuntimeError, match=r"allreduce of 'layers.2.weight': .* got False later"):
        weight.allreduce = False
    fine = {"param_name_patterns_for_fp32_local_accumulation": ("layers.?.weight", "all")}
    model = DistributedDataParallel(_net(), _config(**fine), groups)
    with pytest.raises(TypeError, match="config: expected a DistributedDataParallelConfig"):
        DistributedDataParallel(_net(), {"bucket_size": 3})
    config = model.config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_mib = 3
    found["unchanged"] = str(config == _config(**fine))
    return found


def test_what_cannot_be_is_refused():
    first, second = run_on_ranks(_refused, 2)
    assert first == second
    assert "marked so (allreduce=False): layers.2.weight" in first["expert"]
    assert "a divisor of the 2 data-parallel ranks" in first["instances"]
    assert "materialise it first" in first["meta"]
    assert "have fully_shard do so with init_model_with_meta_device" in first["meta"]
    assert "'router.*', which matches none of" in first["pattern"]
    assert "expected a ProcessGroupCollection or None, got object" in first["groups"]
    assert "expected 1, as process_groups have, got 2" in first["other instances"]
    assert "in a group of its own on rank 1; make one mesh, or process" in first["groups of some"]
    assert "expected a model with a forward, got ModuleList" in first["containers"]
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        assert f"rank 1: {name} is True, on rank 0 False" in first[name]
    assert "rank 1: 'layers.0.weight'" in first["marks"]
    assert "torch.float32, shared embedding" in first["marks"]
    assert first["unchanged"] == "True"
