"""A hang tells its story: who waits for whom, on every rank that is alive."""

import datetime
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sidestream as ss
from sidestream.sharding.errors import CommunicationError, communicating
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Job, batch, build, loss_of, run_step
from sidestream.tests.sharding.warned import warned

LIMIT_S = 3.0


def over_short_group(zero: int) -> Any:
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT_S))
    return build(Job(zero=zero, options={"device_mesh": DeviceMesh.from_group(group, "cpu")}))


def told(wait: Any) -> tuple[str, list[str]]:
    """The error that ends `wait()`, and what this rank was warned of before it."""
    with warned() as texts:
        try:
            wait()
        except CommunicationError as error:
            return str(error), texts
    raise AssertionError("nothing failed")


def one_sleeps(rank: int, world_size: int, zero: int) -> tuple[str, list[str]]:
    job = Job(zero=zero)
    model, optimizer = over_short_group(zero)
    run_step(model, optimizer, job, 0, rank, world_size)
    if rank == 2:
        time.sleep(LIMIT_S + 0.5)
        return "", []
    return told(lambda: run_step(model, optimizer, job, 1, rank, world_size))


def test_a_rank_that_sleeps_in_user_code_is_named_with_its_line() -> None:
    for error, texts in run_on_ranks(one_sleeps, 4, 2):
        print(error)
        print(texts)
