"""The plan of a step: no hazard, no wait too many, and the runtime does what the plan says."""

from dataclasses import replace
from typing import Any

import pytest

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.trace import Kind
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.step_plan import (
    PlanGroup,
    PlanOptions,
    Step,
    find_hazards,
    plan_step,
)
from sidestream.tests.sharding.trainer import Job, build, run_step

CASES = {
    f"zero{zero}, {groups} groups, prefetch {prefetch}": (zero, groups, prefetch)
    for zero in range(4)
    for groups in (1, 2, 5)
    for prefetch in (0, 1, 2)
}


def make_plan(
    zero: int,
    num_groups: int,
    prefetch: int,
    *,
    sync: bool = True,
    reshard: bool | None = None,
) -> tuple[Step, ...]:
    groups = [
        PlanGroup(
            (index,),
            reshard_after_forward=zero == 3 and (index > 0 if reshard is None else reshard),
            is_root=index == 0,
        )
        for index in range(num_groups)
    ]
    order = tuple(reversed(range(num_groups)))
    return plan_step(groups, PlanOptions(zero == 3, prefetch, order, sync))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plan_has_no_hazard(case: tuple[int, int, int]) -> None:
    assert find_hazards(make_plan(*case)) == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_wait_on_data_is_needed(case: tuple[int, int, int]) -> None:
    plan = make_plan(*case)
    waits = [(position, wait) for position, step in enumerate(plan) for wait in step.waits]
    assert waits
    for position, wait in waits:
        step = plan[position]
        without = replace(step, waits=tuple(w for w in step.waits if w != wait))
        broken = [*plan[:position], without, *plan[position + 1 :]]
        assert find_hazards(broken), (
            f"{step.kind} of unit {step.unit} does not need to wait for {plan[wait]}"
        )


def test_checker_finds_a_read_before_its_write() -> None:
    write = Step(Kind.GATHER, 0, "gather", frozenset(), frozenset({"params 0"}))
    read = Step(Kind.FORWARD, 0, "compute", frozenset({"params 0"}), frozenset())
    assert find_hazards([write, read]) == [(0, 1)]
    assert find_hazards([write, replace(read, waits=(0,))]) == []


def test_zero3_gathers_twice_and_exchanges_once_per_unit() -> None:
    kinds = [(step.kind, step.unit) for step in make_plan(3, 4, 1)]
    for unit in range(1, 4):
        assert kinds.count((Kind.GATHER, unit)) == 2
        assert kinds.count((Kind.EXCHANGE, unit)) == 1
    assert kinds.count((Kind.GATHER, 0)) == 1, "the root stays gathered from forward to backward"


def traced_step(
    rank: int, world_size: int, job: Job, warm_up: int, sync: bool
) -> list[tuple[str, int]]:
    model, optimizer = build(job)
    runtime = runtime_of(model)
    for step in range(warm_up):
        run_step(model, optimizer, job, step, rank, world_size)
        optimizer.step()
        optimizer.zero_grad()
    runtime.trace.steps = []
    if sync:
        run_step(model, optimizer, job, warm_up, rank, world_size)
    else:
        with ss.no_sync(model):
            run_step(model, optimizer, job, warm_up, rank, world_size)
    return [(kind.value, unit) for kind, unit in runtime.trace.steps]


RUNTIME_CASES: dict[str, dict[str, Any]] = {
    "zero3": {"zero": 3},
    "zero3, prefetch 2": {"zero": 3, "options": {"prefetch": 2}},
    "zero3, prefetch 0": {"zero": 3, "options": {"prefetch": 0}},
    "zero3, keep after forward": {"zero": 3, "options": {"reshard_after_forward": False}},
    "zero3, reshard root": {"zero": 3, "options": {"reshard_after_forward": True}},
    "zero3, gathers in line": {"zero": 3, "options": {"overlap_param_gather": False}},
    "zero2, gathers in line": {"zero": 2, "options": {"overlap_param_gather": False}},
    "zero2, reshard": {"zero": 2, "options": {"reshard_after_forward": True}},
    "zero2": {"zero": 2},
    "zero1": {"zero": 1},
    "zero0": {"zero": 0},
}


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no_sync"])
@pytest.mark.parametrize("case", RUNTIME_CASES.values(), ids=RUNTIME_CASES)
def test_runtime_follows_the_plan(case: dict[str, Any], sync: bool) -> None:
    job = Job(**case)
    for trace in run_on_ranks(traced_step, 2, job, 2, sync):
        plan = make_plan(
            job.zero or 0,
            4,
            job.options.get("prefetch", int(job.options.get("overlap_param_gather", True))),
            sync=sync,
            reshard=job.options.get("reshard_after_forward"),
        )
        expected = [(step.kind.value, step.unit) for step in plan if step.kind is not Kind.STEP]
        if job.zero == 0:
            # Nothing has to move where every rank keeps all.
            moving = {"gather", "finish_gather"}
            expected = [entry for entry in expected if entry[0] not in moving]
            trace = [entry for entry in trace if entry[0] not in moving]
        assert trace == expected
