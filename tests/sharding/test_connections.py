"""CUDA_DEVICE_MAX_CONNECTIONS=1 undoes the overlap that was asked for, which is said on GPUs."""

import os
from dataclasses import dataclass
from unittest import mock

from sidestream.sharding import slow_options
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Job, build
from sidestream.tests.sharding.warned import warned

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
NO_OVERLAP = {"overlap_grad_reduce": False, "overlap_param_gather": False}


@dataclass(frozen=True)
class Case:
    value: str | None
    options: dict[str, bool]
    has_streams: bool = True


CASES = {
    "both overlap": Case("1", {}),
    "gathers overlap": Case("1", {"overlap_grad_reduce": False}),
    "no overlap asked for": Case("1", NO_OVERLAP),
    "more connections": Case("8", {}),
    "not set": Case(None, {}),
    "on a CPU": Case("1", {}, has_streams=False),
}


def shard(case: Case) -> list[str]:
    """What a model's start says of the variable."""
    with (
        warned() as texts,
        mock.patch.object(slow_options, "_has_streams", lambda _: case.has_streams),
        mock.patch.dict(os.environ, {VARIABLE: case.value or ""}),
    ):
        if case.value is None:
            del os.environ[VARIABLE]
        build(Job(options=case.options))
    return [text for text in texts if VARIABLE in text]


def shard_all(rank: int, world_size: int) -> dict[str, list[str]]:
    return {name: shard(case) for name, case in CASES.items()}


def test_said_by_the_first_rank_where_it_matters() -> None:
    first, second = run_on_ranks(shard_all, 2)
    assert not any(second.values())
    assert [name for name, texts in first.items() if texts] == ["both overlap", "gathers overlap"]
    (text,) = first["both overlap"]
    assert "is 1, so gathers and exchanges wait" in text
    assert "unset it" in text


def test_one_rank_has_nothing_to_overlap() -> None:
    assert shard(CASES["both overlap"]) == []
