"""Lanes that are late and out of step: on each rank another one of its gathers and exchanges starts
late, its waits are late, and works of a lane are finished sooner than anybody asks. No bit changes.
"""

import random
import time
from typing import Any

import pytest

from sidestream.sharding.collectives import Channel, Pending
from sidestream.sharding.lanes import DeferredLane, Event
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import options_of
from sidestream.tests.sharding.trainer import Job, run_all

LATE_S = 0.003
JOBS = {f"ZeRO-{zero}": Job(zero=zero, accumulate=2, clip=0.5) for zero in range(4)}


class Disturbances:
    """Of one rank, always the same for a seed; `early`: works are finished early too, which ranks
    on one axis may do each in its own way: no operation there is begun by the end of another.
    """

    def __init__(self, seed: int, *, early: bool) -> None:
        self._chance = random.Random(seed)
        self._early = early
        self._begun: list[Event] = []
        self.count = 0

    def install(self) -> None:
        """Disturb this process from now on."""
        for owner, name in (
            (Channel, "gather"),
            (Channel, "gather_reduced"),
            (Channel, "exchange"),
            (Pending, "wait"),
        ):
            setattr(owner, name, self._late(getattr(owner, name)))
        submit = DeferredLane.submit

        def submitted(lane: DeferredLane, what: str, *stages: Any) -> Event:
            event = submit(lane, what, *stages)
            self._begun.append(event)
            if self._early and self._chance.random() < 0.5:
                self._finish_some()
            return event

        DeferredLane.submit = submitted  # type: ignore[method-assign]

    def _finish_some(self) -> None:
        """The last that was begun, whose lane then runs the older ones, or any other one."""
        event = self._chance.choice(self._begun[-4:])
        self.count += 1
        if self._chance.random() < 0.5:
            event.advance()
        else:
            event.wait()

    def _late(self, real: Any) -> Any:
        def late(*args: Any, **kwargs: Any) -> Any:
            if self._chance.random() < 0.3:
                self.count += 1
                time.sleep(self._chance.uniform(0, LATE_S))
            return real(*args, **kwargs)

        return late


def trains_disturbed(
    rank: int, world_size: int, jobs: dict[str, Job], seeds: list[int], mesh: str | None = None
) -> None:
    if mesh is not None:
        jobs = {name: job.but(options=options_of(mesh)) for name, job in jobs.items()}
    expected = {name: it.sha256 for name, it in run_all(rank, world_size, jobs).items()}
    for seed in seeds:
        disturbances = Disturbances(seed * world_size + rank, early=mesh is None)
        disturbances.install()
        disturbed = {name: it.sha256 for name, it in run_all(rank, world_size, jobs).items()}
        assert disturbed == expected, seed
        assert disturbances.count > 20


def test_late_and_early_lanes_change_no_bit() -> None:
    run_on_ranks(trains_disturbed, 2, {name: job.but(steps=2) for name, job in JOBS.items()}, [0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_orders_of_lanes_change_no_bit(world_size: int) -> None:
    run_on_ranks(trains_disturbed, world_size, JOBS, list(range(1, 6)), timeout_s=100)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["HSDP", "HFSDP, shards apart", "two nodes"])
def test_late_lanes_change_no_bit_on_two_axes(mesh: str) -> None:
    levels = [0, 1, 3] if mesh != "HFSDP, shards apart" else [1, 3]
    jobs = {f"ZeRO-{zero}": JOBS[f"ZeRO-{zero}"] for zero in levels}
    run_on_ranks(trains_disturbed, 4, jobs, [0, 1], mesh, timeout_s=100)
