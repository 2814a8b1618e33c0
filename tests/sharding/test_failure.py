"""A dead rank ends the others soon, with an error that names what they waited for."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import sidestream as ss
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.sharding.meshes import options_of
from sidestream.tests.sharding.trainer import Job, build, run_step

LIMIT_S = 30


def dies(rank: int, world_size: int, zero: int, where: str, mesh: str | None = None) -> None:
    job = Job(zero=zero, options={} if mesh is None else options_of(mesh))
    model, optimizer = build(job)
    run_step(model, optimizer, job, 0, rank, world_size)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        if where == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        model.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run_step(model, optimizer, job, 1, rank, world_size)


def dies_between_steps(rank: int, world_size: int, call: str, path: str) -> None:
    job = Job(zero=3)
    model = None if call == "fully_shard" else build(job)[0]
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if model is None:
        build(job)
    elif call == "full_state_dict":
        ss.full_state_dict(model)
    else:
        ss.save_checkpoint(path, model)


CALLS = {
    "fully_shard": "meeting of all ranks to shard over",
    "full_state_dict": "gather of parameter '",
    "save_checkpoint": "agreement on the checkpoint",
}


@pytest.mark.parametrize("call", CALLS)
def test_killed_rank_ends_collectives_outside_a_step(call: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(dies_between_steps, 3, call, str(tmp_path / "c"), timeout_s=60)
    assert time.monotonic() - start < LIMIT_S
    for rank in (0, 2):
        text = caught.value.failures[rank]
        assert re.search(rf"CommunicationError: rank {rank}: {CALLS[call]}.*failed", text), text


@pytest.mark.parametrize(
    ("zero", "where"), [(3, "forward"), (3, "backward"), (1, "forward"), (0, "backward")]
)
def test_killed_rank_ends_the_others_with_a_named_error(zero: int, where: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(dies, 3, zero, where, timeout_s=60)
    assert time.monotonic() - start < LIMIT_S
    failures = caught.value.failures
    assert "SIGKILL" in failures[1]
    for rank in (0, 2):
        assert "CommunicationError" in failures[rank]
        awaited = (
            rf"rank {rank}: (gather|gradient exchange) of unit '(\(root\)|blocks\.\d)'.* failed"
        )
        assert re.search(awaited, failures[rank]), failures[rank]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("mesh", "zero"), [("HSDP", 3), ("HFSDP, shards apart", 1), ("two nodes", 1), ("two nodes", 3)]
)
def test_ranks_are_named_as_in_the_job_on_two_axes(mesh: str, zero: int, where: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(dies, 4, zero, where, mesh, timeout_s=60)
    assert time.monotonic() - start < LIMIT_S
    neighbours = {0: "[12]", 2: "[03]", 3: "[12]"}  # those along the two axes
    for rank, named in neighbours.items():
        # A wait for several ranks, when it starts, names none of them.
        awaited = (
            rf"CommunicationError: rank {rank}: [a-z ]+ of unit '[^']*'( (from|to) rank {named})? "
            "failed"
        )
        assert re.search(awaited, caught.value.failures[rank]), caught.value.failures[rank]
