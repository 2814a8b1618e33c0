"""A hang tells its story: who waits for whom, on every rank that is alive."""

import datetime
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.sharding.errors import CommunicationError
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Job, build, run_step
from sidestream.tests.sharding.warned import warned

LIMIT_S = 3.0
Told = tuple[str, list[str]]


def over_short_group() -> tuple[nn.Module, Callable[[int], None]]:
    """A model whose collectives have `LIMIT_S`, and its step, after one that all ranks made."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT_S))
    job = Job(zero=2, options={"device_mesh": DeviceMesh.from_group(group, "cpu")})
    model, optimizer = build(job)

    def step(number: int) -> None:
        run_step(model, optimizer, job, number, dist.get_rank(), dist.get_world_size())

    step(0)
    return model, step


def told(wait: Callable[[], object]) -> Told:
    """The error that ends `wait()`, and what this rank was warned of before it."""
    with warned() as texts:
        try:
            wait()
        except CommunicationError as error:
            return str(error), texts
    raise AssertionError("nothing failed")


def one_sleeps(rank: int, world_size: int) -> Told | None:
    _, step = over_short_group()
    if rank == 2:
        time.sleep(LIMIT_S + 0.5)
        return None
    return told(lambda: step(1))


def one_waits_elsewhere(rank: int, world_size: int) -> Told:
    model, step = over_short_group()
    collectives = runtime_of(model).collectives
    if rank == 2:
        return told(lambda: collectives.all_reduce(torch.ones(1), dist.ReduceOp.MAX, "a norm"))
    return told(lambda: step(1))


def one_is_stopped(rank: int, world_size: int) -> Told | None:
    _, step = over_short_group()
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    time.sleep(0.2 * LIMIT_S)  # a look: it has said who it is
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    try:
        return told(lambda: step(1))
    finally:
        os.kill(pids[0], signal.SIGCONT)


def one_ends(rank: int, world_size: int) -> tuple[str, str] | None:
    """Before that, rank 0 asks the others, who need not call anything."""
    model, step = over_short_group()
    said = ""
    if rank == 0:
        assert ss.explain(model).others == ""
        said = ss.explain(model, ask_others_s=10).others
        assert said in str(ss.explain(model)).replace("\n  ", "\n")
    dist.barrier()
    if rank == 2:
        return None
    return told(lambda: step(1))[0], said


CASES = {one_sleeps: 4, one_waits_elsewhere: 3, one_is_stopped: 3, one_ends: 3}


@pytest.fixture(scope="module")
def runs() -> dict[Callable[..., Any], Future[list[Any]]]:
    """All at once: they wait for time limits."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        return {case: pool.submit(run_on_ranks, case, size) for case, size in CASES.items()}


def check(stories: list[Told | None], sentence: str, alive: list[int]) -> list[str]:
    """`sentence` stands in the error and in the warning of all who live; returns the errors."""
    errors = []
    for rank in alive:
        error, texts = stories[rank] or ("", [])
        assert re.search(f"What the ranks do: {sentence}", error), error
        assert len(texts) == 1, "told once"
        assert re.search(rf"the ranks were asked \d\.\d s ago: {sentence}", texts[0]), texts[0]
        errors.append(error)
    return errors


def test_a_rank_in_user_code_is_named_with_its_line(runs: Any) -> None:
    sentence = (
        r"ranks 0, 1, 3 have waited [12]\.\d s in gradient exchange of unit 'blocks\.2' for "
        r"rank 2, which stood outside forward and backward "
        r"\(at sharding/test_who_waits\.py:\d+ in one_sleeps"
    )
    for error in check(runs[one_sleeps].result(), sentence, [0, 1, 3]):
        assert re.search(r"rank 2: .*; last: .*unit 'blocks\.2' released [1-9]\.\d s ago", error)
        assert "rank 1: in a backward, " in error


def test_ranks_in_different_collectives_are_told_of_each_other(runs: Any) -> None:
    exchange = r"gradient exchange of unit 'blocks\.2'"
    ours = rf"ranks 0, 1 have waited \d\.\d s in {exchange} for rank 2, which stood in a norm"
    theirs = rf"rank 2 has waited \d\.\d s in a norm for ranks 0, 1, which stood in {exchange}"
    check(runs[one_waits_elsewhere].result(), f"{ours}; {theirs}", [0, 1, 2])


def test_a_stopped_rank_is_named_as_such(runs: Any) -> None:
    sentence = r"ranks 1, 2 have waited .* for rank 0, which is stopped, as by SIGSTOP \(process \d"
    check(runs[one_is_stopped].result(), sentence, [1, 2])


def test_a_rank_that_ended_is_named_at_once(runs: Any) -> None:
    (first, said), (second, _), _ = runs[one_ends].result()
    for error in (first, second):
        assert "Timed out" not in error, "that is no matter of the time limit"
        # Even where gloo names nobody, or another rank that failed for the same reason.
        assert re.search(r"rank 2(, which)? has ended \(process \d", error), error
    assert "no rank waits" in said or "in barrier" in said
    assert re.search(r"rank 1: outside forward and backward; at .*test_who_waits\.py:\d+", said)
