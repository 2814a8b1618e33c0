"""`DistributedDataParallel` over `fully_shard`: beside torch's own, and what it must not do."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import sidestream as ss
from sidestream.sharding.data_parallel import DistributedDataParallel
from sidestream.sharding.data_parallel_config import DistributedDataParallelConfig
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.trace import Kind
from sidestream.tests.ranks import run_on_ranks

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
        "elements": {"bucket_mib": None, "bucket_size": 3 * (WIDTH * WIDTH + WIDTH) - 1},
        "one": {"bucket_mib": None},
        "padded": {"pad_buckets_for_high_nccl_busbw": True},
        "no overlap": {"bucket_mib": None, "overlap_grad_reduce": False},
    }.items():
        built = DistributedDataParallel(shared if name == "shared" else _net(), _config(**options))
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
    assert [count for _, count in found["elements"]] == [6, 6]
    assert (
        [count for _, count in found["one"]] == [12] == [count for _, count in found["no overlap"]]
    )
    assert all(numel % 2**16 == 0 for numel, _ in found["padded"])


# ---- gradients that wait, scaling, clearing


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
        model.finish_grad_sync()
        found[name] = close(_grads(model))
        model.scale_gradients(torch.tensor(0.25))
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
    config = _config(check_for_nan_in_grad=True, check_for_large_grads=True)
    model = DistributedDataParallel(_net(), config)
    x = _batch(0, rank)
    model(x).square().mean().backward()
    model.zero_grad_buffer()
    if rank == 1:
        x = x.clone()
        x[0, 0] = math.nan
    try:
        model(x).square().mean().backward()
    except ss.NonFiniteGradientError as error:
        found["at once"] = (str(error), error.ranks, error.step)
    return found


def test_gradients_that_are_not_finite_are_named_on_all_ranks():
    first, second = run_on_ranks(_checks, 2)
    assert first == second
    text, ranks, step = first["at once"]
    assert step == 2 and ranks["layers.0.weight"] == (1,)
    assert "exchange 2" in text and "'layers.0.weight' on rank 1" in text
