"""What a forward writes to its own parameters lasts, at every ZeRO level, as on a plain model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import WORLD, options_of
from sidestream.tests.sharding.twins import LEVELS, Twins

SHAPE = (4, 6)
BF16 = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Writer(nn.Module):
    """A linear layer, a scale, and a `write` before the scale is used, which autograd allows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.teacher = copy.deepcopy(self.linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.write()
        return x * self.scale + self.teacher(x)

    def write(self) -> None:
        pass


class InPlace(Writer):
    def write(self) -> None:
        self.scale.clamp_(max=0.9).mul_(0.99)


class Part(Writer):
    def write(self) -> None:
        self.scale[2:4] = 0.25


class MovingAverage(Writer):
    def write(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


class DataInPlace(Writer):
    def write(self) -> None:
        self.scale.data.clamp_(max=0.9).mul_(0.99)


class DataAssigned(Writer):
    def write(self) -> None:
        self.scale.data = self.scale.data.clamp(max=0.9) * 0.99


class DataInFunction(Writer):
    def write(self) -> None:
        _average(self.teacher, self.linear)


def _average(slow: nn.Module, fast: nn.Module) -> None:
    for target, source in zip(slow.parameters(), fast.parameters(), strict=True):
        target.data.mul_(0.9).add_(source.data, alpha=0.1)


class DataInHook(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_pre_hook(_normalise)


def _normalise(module: nn.Linear, _args: object) -> None:
    module.weight.data /= module.weight.data.norm()


WAYS = (InPlace, Part, MovingAverage, DataInPlace, DataAssigned, DataInFunction, DataInHook)


class Block(nn.Module):
    """A unit around a writer."""

    def __init__(self, writer: nn.Module) -> None:
        super().__init__()
        self.writer = writer

    def forward(self, x: Tensor) -> Tensor:
        return self.writer(x)


class Model(nn.Module):
    """Two units that write, and a root that does."""

    def __init__(self, way: type[Writer], *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList([Block(way()), Block(way())])
        self.own = way()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.own(x)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def check(twins: Twins, *, steps: int = 2) -> None:
    """Train both, the plain one with all ranks' data in one forward, which writes once."""
    for step in range(steps):
        for microbatch in range(2):
            inputs = twins.data(10 * step + microbatch, *SHAPE)
            loss(twins.plain, torch.cat(inputs)).backward()
            value = loss(twins.sharded, inputs[twins.rank])
            if not getattr(twins.plain, "recompute", False):
                twins.check_params()  # also before backward
            value.backward()
            twins.check_grads()
            twins.check_params()
        twins.step()
        with torch.no_grad():
            inputs = twins.data(100 + step, *SHAPE)
            expected = twins.plain(torch.cat(inputs)).chunk(twins.world_size)[twins.rank]
            torch.testing.assert_close(
                twins.sharded(inputs[twins.rank]), expected, rtol=1e-5, atol=1e-6
            )
        twins.check_params()


def in_training_and_evaluation(rank: int, world_size: int, way: type[Writer]) -> None:
    for zero in LEVELS[world_size]:
        # Of the levels, only 3 frees the root's parameters when told to.
        for options in ({}, {"reshard_after_forward": True})[: 1 + (zero == 3)]:
            torch.manual_seed(0)
            check(Twins(rank, world_size, Model(way), zero, [Block], **options))
        torch.manual_seed(0)
        check(Twins(rank, world_size, Model(way, recompute=True), zero, [Block]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_writes_last(way: type[Writer], world_size: int) -> None:
    run_on_ranks(in_training_and_evaluation, world_size, way)


def on_meshes(rank: int, world_size: int) -> None:
    """Where parameters at rest are neither the main ones nor all, they are kept besides."""
    for mesh in ("HSDP", "HFSDP", "HFSDP, shards apart"):
        for way, recompute in ((InPlace, False), (DataInFunction, True)):
            torch.manual_seed(0)
            model = Model(way, recompute=recompute)
            check(Twins(rank, world_size, model, 3, [Block], **options_of(mesh)))


def test_writes_last_on_meshes() -> None:
    run_on_ranks(on_meshes, WORLD)


def written_in_compute_dtype(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        for way in WAYS:
            torch.manual_seed(0)
            model = Model(way)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            ss.fully_shard(
                model,
                zero_dp_strategy=zero,
                fsdp_unit_modules=[Block],
                mixed_precision_policy=BF16,
            )
            plain = copy.deepcopy(Model(way))
            plain.load_state_dict(before)
            plain.to(torch.bfloat16)
            x = torch.ones(SHAPE)
            model(x)
            plain(x.bfloat16())
            after = ss.full_state_dict(model)
            for name, written in plain.state_dict().items():
                kept = written == before[name].bfloat16()
                assert after[name].dtype == torch.float32
                expected = torch.where(kept, before[name], written.float())
                torch.testing.assert_close(after[name], expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unwritten_elements_keep_their_main_bits(world_size: int) -> None:
    run_on_ranks(written_in_compute_dtype, world_size)


class Late(Writer):
    """Writes what autograd has saved, which a plain model's backward refuses."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        y = self.linear(torch.tanh(x))
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return y


def written_after_use(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        twins = Twins(rank, world_size, nn.Sequential(Late(), nn.Linear(6, 2)), zero, None)
        for model in (twins.plain, twins.sharded):
            value = loss(model, torch.ones(SHAPE))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                value.backward()
        # What was written stays.
        twins.check_params()


def stepped_after_forward(rank: int, world_size: int) -> None:
    """A backward through weights that were changed since."""
    for zero in LEVELS[world_size]:
        for change in ("step", "edit"):
            torch.manual_seed(0)
            model = nn.Sequential(Writer(), Block(Writer()), nn.Linear(6, 2))
            twins = Twins(rank, world_size, model, zero, [Block])
            for model, optimizer in (
                (twins.plain, twins.plain_optimizer),
                (twins.sharded, twins.optimizer),
            ):
                value = loss(model, torch.ones(SHAPE))
                value.backward(retain_graph=True)
                if change == "step":
                    optimizer.step()
                else:
                    with torch.no_grad():
                        model[1].writer.linear.weight.mul_(0.5)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    value.backward()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", [written_after_use.__name__, stepped_after_forward.__name__])
def test_backward_refuses_what_a_plain_one_refuses(case: str, world_size: int) -> None:
    run_on_ranks(globals()[case], world_size)


class Reshaping(Writer):
    def write(self) -> None:
        self.scale.data = torch.ones(3, 6)


def other_data(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = nn.Sequential(Reshaping(), nn.Linear(6, 2))
        ss.fully_shard(model, zero_dp_strategy=zero)
        before = ss.full_state_dict(model)
        x = torch.ones(3, 6)
        with pytest.raises(RuntimeError, match=r"parameter '0.scale': .*shape \(6,\).*\(3, 6\)"):
            model(x)
        after: dict[str, Any] = ss.full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_data_of_another_shape_is_refused_by_name() -> None:
    run_on_ranks(other_data, 2)


def embedding_with_max_norm(rank: int, world_size: int) -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for zero in LEVELS[world_size]:
            torch.manual_seed(0)
            model = nn.Sequential(kind(9, 6, max_norm=1.0), nn.Linear(6, 2))
            if world_size > 1:
                with pytest.raises(ValueError, match=r"parameter '0.weight': .*max_norm=1.0"):
                    ss.fully_shard(model, zero_dp_strategy=zero)
                assert not any(isinstance(p, ss.ShardedTensor) for p in model.parameters())
                continue
            twins = Twins(rank, world_size, model, zero, [kind])
            for step in range(3):
                twins.backward(loss, [torch.tensor([[step, 2 * step, 8]])])
                twins.check_params()
                twins.step()
            twins.check_params()


@pytest.mark.parametrize("world_size", [1, 2])
def test_max_norm_is_kept_on_one_rank_and_refused_by_name_on_several(world_size: int) -> None:
    run_on_ranks(embedding_with_max_norm, world_size)
