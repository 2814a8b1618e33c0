"""`module.to` and its kin on a sharded model: what changes nothing passes, the rest is refused."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins, square_loss

Convert = Callable[[nn.Module], object]
NO_CHANGE: dict[str, Convert] = {
    "to cpu:0": lambda module: module.to("cpu:0"),
    "to a device": lambda module: module.to(torch.device("cpu", 0), non_blocking=True),
    "to device and dtype": lambda module: module.to("cpu", torch.float32),
    "to dtype": lambda module: module.to(torch.float32),
    "to a tensor's": lambda module: module.to(torch.empty(1)),
    "float": lambda module: module.float(),
    "cpu": lambda module: module.cpu(),
    "type": lambda module: module.type(torch.float32),
}
CHANGE: dict[str, Convert] = {
    "half": lambda module: module.half(),
    "double": lambda module: module.to("cpu:0", torch.float64),
    "meta": lambda module: module.to("meta"),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def goes_on(rank: int, world_size: int) -> None:
    for zero in range(4):
        for compute in (torch.float32, torch.bfloat16):
            policy = ss.MixedPrecisionPolicy(param_dtype=compute)
            sharded = model()
            ss.fully_shard(
                sharded,
                fsdp_unit_modules=[nn.Linear],
                zero_dp_strategy=zero,
                mixed_precision_policy=policy,
            )
            faces, state = list(sharded.parameters()), ss.full_state_dict(sharded)
            x = torch.ones(2, 6)
            expected = sharded(x)
            for name, convert in NO_CHANGE.items():
                assert convert(sharded) is sharded
                now = list(sharded.parameters())
                assert all(a is b for a, b in zip(now, faces, strict=True)), name
                assert torch.equal(sharded(x), expected), name
            for convert in CHANGE.values():
                with pytest.raises(RuntimeError, match=r"'0.weight' .* keeps the dtype and device"):
                    convert(sharded)
            assert torch.equal(sharded(x), expected)
            for name, value in ss.full_state_dict(sharded).items():
                assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_conversions_that_change_nothing_pass_and_others_are_refused(world_size: int) -> None:
    run_on_ranks(goes_on, world_size)


def trains(rank: int, world_size: int) -> None:
    for zero in range(4):
        twins = Twins(rank, world_size, model(), zero, [nn.Linear])
        for step in range(3):
            twins.sharded.to("cpu:0")  # what accelerate does before each of its loops
            twins.backward(square_loss, twins.data(step, 2, 6))
            twins.sharded.float()
            twins.check_grads()
            twins.step()
        twins.check_params()


def test_training_goes_on_over_conversions_that_change_nothing() -> None:
    run_on_ranks(trains, 2)


@pytest.mark.parametrize("current", [0, 1])
def test_a_gpu_without_an_index_is_the_current_one(current: int) -> None:
    with FakeTensorMode():
        local = torch.empty(6, device="cuda:1")
    tensor = ss.ShardedTensor(
        local, shape=(2, 3), start=0, name="w", group=None, intervals=((0, 6),)
    )
    tensor = nn.Parameter(tensor, requires_grad=False)
    # What `tensor.to` calls; itself it asks for a GPU first.
    convert = torch.ops.aten._to_copy
    with mock.patch.object(torch.cuda, "current_device", return_value=current):
        assert convert(tensor, device="cuda:1").device == torch.device("cuda", 1)
        others = ["cuda:0", "cpu", *(["cuda"] if current == 0 else [])]
        for device in others:
            with pytest.raises(RuntimeError, match=rf"on cuda:1, got a conversion .* on {device}"):
                convert(tensor, device=device)
        if current == 1:
            assert convert(tensor, device="cuda").device == torch.device("cuda", 1)
