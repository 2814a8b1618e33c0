"""A step of `sidestream.AdamW` writes the compute-dtype parameters too: the gather after it casts
nothing, and whatever else is done to the main parameters still arrives there.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import WORLD, options_of
from sidestream.tests.sharding.trainer import Block, Transformer, batch, full_params, loss_of
from sidestream.tests.sharding.twins import LEVELS

Act = Callable[["Job"], object]


class Job:
    """A model in bfloat16 over FP32 main parameters."""

    def __init__(
        self, rank: int, world_size: int, zero: int, kind: Any = ss.AdamW, **options: Any
    ) -> None:
        self.rank, self.world_size = rank, world_size
        torch.manual_seed(0)
        self.model: nn.Module = Transformer()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        ss.fully_shard(
            self.model,
            self.optimizer,
            fsdp_unit_modules=[Block],
            zero_dp_strategy=zero,
            mixed_precision_policy=ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            elementwise=True,
            **options,
        )

    def loss(self, step: int = 0) -> Tensor:
        return loss_of(self.model, batch(step, rank=self.rank, world_size=self.world_size))

    def train(self, step: int = 0) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, name: str) -> None:
        """What the next forward computes with are the casts of the main parameters."""
        seen: dict[str, Tensor] = {}

        def look(module: nn.Module, _: object, prefix: str) -> None:
            for key, param in module.named_parameters(recurse=False):
                seen[prefix + key] = param.detach().clone()

        handles = [
            module.register_forward_pre_hook(
                lambda m, x, p=f"{prefix}." if prefix else "": look(m, x, p)
            )
            for prefix, module in self.model.named_modules()
        ]
        expected = full_params(self.model)
        with torch.no_grad():
            self.loss()
        for handle in handles:
            handle.remove()
        unseen = {key for key in expected if key.endswith("gain")}  # seen by hooks as sharded
        for key, value in expected.items():
            got = seen[key]
            if isinstance(got, ss.ShardedTensor):
                assert key in unseen, key
                continue
            assert torch.equal(got, value.bfloat16()), f"{name}: {key}"


class Casts(TorchDispatchMode):
    """Counts the copies that make bfloat16 of flat FP32 memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            narrows = target.dtype is torch.bfloat16 and source.dtype is torch.float32
            self.count += narrows and target.dim() == 1 and target.numel() > 0
        return func(*args, **kwargs or {})


def casts_of(run: Callable[[], object]) -> int:
    with Casts() as casts:
        run()
    return casts.count


def gathers(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        counts = {}
        for kind in (torch.optim.AdamW, ss.AdamW):
            job = Job(rank, world_size, zero, kind)
            units = len(runtime_of(job.model).units)
            job.loss().backward()
            job.optimizer.step()
            counts[kind] = casts_of(job.loss)
            assert zero == 3 or casts_of(job.loss) == 0, "nothing has changed"
        assert counts[torch.optim.AdamW] == units == 4
        assert counts[ss.AdamW] == (units if zero == 3 else 0), f"ZeRO-{zero}"


@pytest.mark.parametrize("world_size", LEVELS)
def test_the_gather_after_a_step_casts_nothing_where_parameters_stay(world_size: int) -> None:
    run_on_ranks(gathers, world_size)


def meshes(rank: int, world_size: int) -> None:
    """HSDP, and HFSDP, which keeps parameters at rest in compute dtype at ZeRO-3 too."""
    for mesh in ("HSDP", "HFSDP"):
        options = options_of(mesh)
        for zero in (1, 3):
            models = []
            for kind in (torch.optim.AdamW, ss.AdamW):
                job = Job(rank, world_size, zero, functools.partial(kind, fused=True), **options)
                job.train(0)
                stays = kind is ss.AdamW and (zero == 1 or mesh == "HFSDP")
                what = f"{mesh}, ZeRO-{zero}, {kind.__module__}"
                assert casts_of(job.loss) == (0 if stays else 4), what
                job.train(1)
                job.check(what)
                multiply(job)
                job.check(what)
                models.append(full_params(job.model))
            for name, value in models[0].items():
                assert torch.equal(value, models[1][name]), f"{mesh}, ZeRO-{zero}: {name}"


def test_meshes_with_an_outer_axis() -> None:
    run_on_ranks(meshes, WORLD)


# ---- other writes between a step and the next gather


@torch.no_grad()
def multiply(job: Job) -> None:
    for param in job.model.parameters():
        param.mul_(1.5)


@torch.no_grad()
def multiply_data(job: Job) -> None:
    for param in job.model.parameters():
        param.data.mul_(1.5)


@torch.no_grad()
def write_to_the_data_of_locals(job: Job) -> None:
    for param in job.model.parameters():
        param.to_local().data.mul_(1.5)


def write_to_locals_taken_before(job: Job) -> None:
    """By NumPy, which leaves no trace in version counters, like a collective over them."""
    parts = [param.detach().to_local() for param in job.model.parameters()]
    job.train(2)
    for part in parts:
        part.numpy()[:] *= 1.5


def assign_data(job: Job) -> None:
    for param in job.model.parameters():
        param.data = param.detach() * 1.5


def load_a_state_dict(job: Job) -> None:
    state = ss.full_state_dict(job.model)
    job.model.load_state_dict({key: value * 1.5 for key, value in state.items()})


def write_gathered(job: Job) -> None:
    with ss.gathered(job.model, write=True), torch.no_grad():
        for param in job.model.parameters():
            param.mul_(1.5)


def step_again(job: Job) -> None:
    """Without a forward between the two."""
    for param in job.model.parameters():
        param.grad = torch.ones_like(param.detach())
    job.optimizer.step()


def step_in_a_closure(job: Job) -> None:
    def closure() -> Tensor:
        job.optimizer.zero_grad()
        loss = job.loss(1)
        loss.backward()
        multiply(job)
        return loss

    job.optimizer.step(closure)


def step_with_another_optimizer(job: Job) -> None:
    """Which writes through `.data`, and takes the parameters from the first."""

    class Old(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.mul_(1.5)

    optimizer = Old(job.model.parameters(), lr=1.0)
    job.optimizer = ss.fully_shard_optimizer(optimizer, elementwise=True)
    job.optimizer.step()


def step_without_gradients(job: Job) -> None:
    multiply(job)
    job.optimizer.step()


def skip_a_step(job: Job) -> None:
    """A gradient that is not finite: nothing is written, not even what was to be cast."""
    multiply(job)
    job.optimizer.found_inf = torch.ones(())
    step_again(job)
    del job.optimizer.found_inf


def skip_a_step_after_unseen_writes(job: Job) -> None:
    for param in job.model.parameters():
        with torch.no_grad():
            param.to_local().data.mul_(1.5)
    job.optimizer.found_inf = torch.ones(())
    step_again(job)
    del job.optimizer.found_inf


def write_in_a_hook(job: Job) -> None:
    handle = job.optimizer.register_step_post_hook(lambda *_: multiply_data(job))
    step_again(job)
    handle.remove()


def fail_between_update_and_copy(job: Job) -> None:
    operator = torch._fused_adamw_

    def failing(*args: Any, **options: Any) -> None:
        operator(*args, **options)
        raise KeyboardInterrupt

    job.loss(1).backward()  # what is gathered is fresh
    with mock.patch.object(torch, "_fused_adamw_", failing), pytest.raises(KeyboardInterrupt):
        job.optimizer.step()


ACTS: dict[str, Act] = {
    act.__name__.replace("_", " "): act
    for act in (
        multiply,
        multiply_data,
        write_to_the_data_of_locals,
        write_to_locals_taken_before,
        assign_data,
        load_a_state_dict,
        write_gathered,
        step_again,
        step_in_a_closure,
        step_with_another_optimizer,
        step_without_gradients,
        skip_a_step,
        skip_a_step_after_unseen_writes,
        write_in_a_hook,
        fail_between_update_and_copy,
    )
}


def write_between(rank: int, world_size: int, zero: int, folder: str) -> None:
    for name, act in ACTS.items():
        job = Job(rank, world_size, zero)
        job.train(0)
        before = full_params(job.model)
        act(job)
        what = f"ZeRO-{zero}, {name}"
        after = full_params(job.model)
        assert any(not torch.equal(after[k], before[k]) for k in before), what
        job.check(what)
        job.train(1)
        job.check(f"{what}, a step later")
    job = Job(rank, world_size, zero)
    job.train(0)
    ss.save_checkpoint(f"{folder}/saved", job.model, job.optimizer)
    ss.save_safetensors(f"{folder}/exported", job.model)
    saved = full_params(job.model)
    for load in (
        lambda: ss.load_checkpoint(f"{folder}/saved", job.model, job.optimizer),
        lambda: ss.load_safetensors(f"{folder}/exported", job.model),
    ):
        job.train(1)
        load()
        assert torch.equal(full_params(job.model)["head.weight"], saved["head.weight"])
        job.check(f"ZeRO-{zero}, loaded")


@pytest.mark.parametrize("zero", [0, 1], ids=["copies of all", "copies of a part"])
def test_other_writes_after_a_step_arrive(zero: int, tmp_path: Path) -> None:
    run_on_ranks(write_between, 2, zero, str(tmp_path))


class Noisy(ss.AdamW):
    """Changes parameters after the step that it inherits, without a trace."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(1.5)


def subclass(rank: int, world_size: int) -> None:
    for zero in range(3):
        job = Job(rank, world_size, zero, Noisy)
        for step in range(2):
            job.train(step)
            job.check(f"ZeRO-{zero}")


def test_a_subclass_that_writes_after_the_step_is_cast_by_the_gather() -> None:
    run_on_ranks(subclass, 2)


def old_graph(rank: int, world_size: int) -> None:
    for zero in range(4):
        job = Job(rank, world_size, zero)
        loss = job.loss()
        loss.backward(retain_graph=True)
        job.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        job.optimizer.zero_grad()
        job.train(1)
        job.check(f"ZeRO-{zero}")


def test_a_graph_from_before_the_step_fails_in_backward() -> None:
    run_on_ranks(old_graph, 2)


def two_optimizers(rank: int, world_size: int) -> None:
    for zero in range(4):
        models = []
        for kinds in ((torch.optim.SGD, torch.optim.AdamW), (torch.optim.SGD, ss.AdamW)):
            torch.manual_seed(0)
            model = Transformer()
            policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            ss.fully_shard(
                model,
                zero_dp_strategy=zero,
                fsdp_unit_modules=[Block],
                mixed_precision_policy=policy,
            )
            params = list(model.parameters())
            vectors = kinds[0]([p for p in params if p.dim() <= 1], lr=0.1)
            fused = {"fused": True} if kinds[1] is torch.optim.AdamW else {}
            matrices = kinds[1]([p for p in params if p.dim() > 1], lr=1e-2, **fused)
            both = [ss.fully_shard_optimizer(o) for o in (vectors, matrices)]
            for step in range(4):
                tokens = batch(step, rank=rank, world_size=world_size)
                loss_of(model, tokens).backward()
                for optimizer in both if step % 2 else both[::-1]:
                    optimizer.step()
                    optimizer.zero_grad()
            models.append(full_params(model))
        for name, value in models[0].items():
            assert torch.equal(value, models[1][name]), f"ZeRO-{zero}: {name}"


def test_units_that_two_optimizers_share() -> None:
    run_on_ranks(two_optimizers, 2)


def test_a_model_that_goes_takes_its_memory_along() -> None:
    job = Job(0, 1, 1)
    job.train()
    storage = runtime_of(job.model).units[0].faces.full[0].untyped_storage()._weak_ref()
    optimizer = job.optimizer
    del job
    assert torch.UntypedStorage._new_with_weak_ptr(storage) is None
    assert optimizer.param_groups
