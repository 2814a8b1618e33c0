"""Sums that read peers' memory: the bits of messages, with files that ranks map for GPUs."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import sidestream as ss
from sidestream.sharding import collectives
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.symmetric import Slots, SymmetricChannel
from sidestream.sharding.wire import PlainWire
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding import trainer
from sidestream.tests.sharding.meshes import options_of
from sidestream.tests.sharding.shared_files import FileMemory, sharing
from sidestream.tests.sharding.trainer import Job

ON: dict[str, Any] = {"symmetric_memory": "on"}
BF16 = {"param_dtype": torch.bfloat16}
JOBS = {
    "zero0": Job(zero=0, steps=2),
    "zero1, no_sync": Job(zero=1, steps=2, accumulate=2, units="fine"),
    "zero2, bf16": Job(zero=2, steps=2, policy=BF16),
    "zero3, one lane": Job(zero=3, steps=2, options={"overlap_grad_reduce": False}),
    "zero3, bf16": Job(zero=3, steps=2, policy=BF16),
    "zero2, mxfp8": Job(zero=2, steps=2, policy={"grad_wire": "mxfp8"}),
    "zero3, nvfp4": Job(zero=3, steps=2, policy={"grad_wire": "nvfp4", "param_wire": "mxfp8"}),
}
MESHES = {
    "HSDP": Job(zero=1, steps=2),
    "HFSDP": Job(zero=3, steps=2, policy={**BF16, "grad_partial_dtype": torch.bfloat16}),
    "two nodes": Job(zero=3, steps=2, policy={"grad_wire": "mxfp8"}),
}


def and_by_messages(rank: int, world_size: int, job: Job) -> tuple[str, str]:
    """The hash of what `job` comes to with symmetric memory, and without."""
    with sharing(), no_messages():
        shared = trainer.run(rank, world_size, job.but(options={**job.options, **ON}))
    sent = trainer.run(rank, world_size, job)
    assert shared.sent_bytes == sent.sent_bytes, "as many bytes go between ranks"
    return shared.sha256, sent.sha256


@contextmanager
def no_messages() -> Iterator[None]:
    with mock.patch.object(collectives.Channel, "exchange", None):
        yield


def compare_jobs(rank: int, world_size: int, jobs: dict[str, Job]) -> None:
    for name, job in jobs.items():
        shared, sent = and_by_messages(rank, world_size, job)
        assert shared == sent, name


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_messages(world_size: int) -> None:
    run_on_ranks(compare_jobs, world_size, JOBS)


def compare_on_mesh(rank: int, world_size: int, mesh: str, job: Job) -> None:
    job = job.but(options=options_of(mesh))
    shared, sent = and_by_messages(rank, world_size, job)
    assert shared == sent


@pytest.mark.parametrize(("mesh", "job"), MESHES.items(), ids=MESHES)
def test_the_bits_of_messages_on_meshes(mesh: str, job: Job) -> None:
    run_on_ranks(compare_on_mesh, 4, mesh, job)


# ---- what orders ranks


class NeverMeets(FileMemory):
    def meet(self, channel: int) -> dist.Work | None:
        return None


def one_slot(self: Slots, memory: Any, rank: int, *, slot_bytes: int, depth: int) -> None:
    """As if a slot could be packed anew as soon as this rank has summed."""
    ORIGINAL_SLOTS(self, memory, rank, slot_bytes=slot_bytes, depth=depth)
    self.count = depth


ORIGINAL_SLOTS = Slots.__init__
LACKS: dict[str, tuple[str, dict[str, Any], Any]] = {
    # What is late on rank 1, and what is missing.
    "sum for packs": ("pack", {"CudaMemory": NeverMeets}, ORIGINAL_SLOTS),
    "pack for sums": ("reduce", {}, one_slot),
}


def late(method: str, rank: int) -> Any:
    original: Callable[..., None] = getattr(PlainWire, method)

    def delayed(*args: Any, **kwargs: Any) -> None:
        if rank == 1:
            time.sleep(0.05)
        original(*args, **kwargs)

    return mock.patch.object(PlainWire, method, delayed)


def train_late(rank: int, world_size: int, lack: str) -> None:
    method, fakes, slots = LACKS[lack]
    job = Job(zero=2, steps=2)
    expected = trainer.run(rank, world_size, job).sha256
    job = job.but(options=ON)
    with late(method, rank):
        with sharing():
            assert trainer.run(rank, world_size, job).sha256 == expected, "a wait is missing"
        with sharing(**fakes), mock.patch.object(Slots, "__init__", slots):
            found = trainer.run(rank, world_size, job).sha256
    all_found: list[Any] = [None] * world_size
    dist.all_gather_object(all_found, found)
    assert {*all_found} != {expected}, "this test cannot see a missing wait"


@pytest.mark.parametrize("lack", LACKS)
def test_results_rest_on_waits_alone(lack: str) -> None:
    run_on_ranks(train_late, 2, lack)


# ---- memory


def bytes_of_slots(rank: int, world_size: int) -> None:
    for zero in (0, 3):
        job = Job(zero=zero, options=ON)
        with sharing():
            model, optimizer = trainer.build(job)
        runtime = runtime_of(model)
        for step in range(2):
            runtime.pool.reset_peak()
            trainer.run_step(model, optimizer, job, step, rank, world_size)
            optimizer.step()
            optimizer.zero_grad()
        found = ss.summary(model)
        (channel,) = [c for c in runtime.collectives.sum_channels[0] if c.received_parts == 0]
        assert isinstance(channel, SymmetricChannel)
        largest = max(4 * unit.spec.layout.numel for unit in runtime.units)
        assert channel.slots.slot_bytes == largest
        assert found.stream_peaks.symmetric == channel.slots.nbytes == 2 * largest
        assert runtime.pool.live_bytes == found.bytes_at_rest
        assert found.peak_bytes - 4 * largest <= runtime.pool.peak_bytes <= found.peak_bytes
        plain = ss.summary(trainer.build(Job(zero=zero))[0])
        # gloo receives the other rank's part alone; where all parts are received it is as much.
        assert found.peak_bytes == plain.peak_bytes + largest // 2
        (said,) = found.exchanges.values()
        assert said.startswith("symmetric memory, 2 slots of") and said in str(found)


def test_slots_are_counted() -> None:
    run_on_ranks(bytes_of_slots, 2)


def frozen_first(rank: int, world_size: int) -> None:
    def train(**options: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        model = trainer.Transformer()
        model.blocks.requires_grad_(False)
        ss.fully_shard(model, fsdp_unit_modules=[trainer.Block], **options)
        for step in range(2):
            trainer.loss_of(model, trainer.batch(step, 0, 1, rank, world_size)).backward()
            model.blocks.requires_grad_(True)
        return model

    with sharing():
        shared = train(**ON)
    expected, found = train(), dict(shared.named_parameters())
    trained = [unit for unit in runtime_of(shared).units if "block" not in unit.spec.name]
    symmetric = ss.summary(shared).stream_peaks.symmetric
    assert symmetric == 2 * max(4 * unit.spec.layout.numel for unit in trained)
    by = {unit.name: unit.exchange for unit in ss.summary(shared).units}
    assert by == {n: "messages" if "block" in n else "symmetric memory" for n in by}
    for name, param in expected.named_parameters():
        assert torch.equal(param.grad.full_tensor(), found[name].grad.full_tensor()), name


def test_what_is_unfrozen_and_fits_no_slot_goes_by_messages() -> None:
    run_on_ranks(frozen_first, 2)


def failed_backward(rank: int, world_size: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("planted")

    job = Job(zero=2)
    with ExitStack() as stack:
        stack.enter_context(sharing())
        model, optimizer = trainer.build(job.but(options=ON))
    hook = model.blocks[0].register_forward_hook(lambda _, __, output: Fails.apply(output))
    for step in range(3):  # an odd number of exchanges begins each time
        with pytest.raises(ValueError, match="planted"):
            trainer.run_step(model, optimizer, job, step, rank, world_size)
    hook.remove()
    for step in range(3):
        planted = mock.patch.object(PlainWire, "pack", side_effect=ValueError("planted"))
        with planted, pytest.raises(ValueError, match="planted"):
            trainer.run_step(model, optimizer, job, step, rank, world_size)
    expected, plain_optimizer = trainer.build(job)
    for one, stepper in ((model, optimizer), (expected, plain_optimizer)):
        trainer.run_step(one, stepper, job, 0, rank, world_size)
        stepper.step()
    assert trainer.sha256_of(trainer.full_params(model)) == trainer.sha256_of(
        trainer.full_params(expected)
    )


def test_a_backward_that_failed_leaves_slots_in_turn() -> None:
    run_on_ranks(failed_backward, 2)
