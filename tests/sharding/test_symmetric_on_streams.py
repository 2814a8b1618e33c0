"""Sums that read peers' memory, over fake streams: the sum waits for peers' packs, the next pack of
a slot for their sums. `on_streams.py` numbers the streams; those of peers come behind.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sidestream.bench.virtual_streams import LoopbackGroup, Machine, Stream, join
from sidestream.sharding import peer_memory
from sidestream.sharding.collectives import Collectives
from sidestream.sharding.runtime import Runtime
from sidestream.sharding.symmetric import Slots
from sidestream.tests.sharding.fake_streams import Late
from sidestream.tests.sharding.on_streams import LANES, SERIAL, Lanes, mains_of, run
from sidestream.tests.sharding.race_detector import Racing
from sidestream.tests.sharding.trainer import Job

JOBS = {
    "zero3": Job(zero=3),
    "zero0": Job(zero=0),
    "zero1, odd units": Job(zero=1, accumulate=2, units="fine"),
    "zero3, bf16": Job(zero=3, policy={"param_dtype": torch.bfloat16}),
}
HSDP = Job(zero=2, options={"dp_outer_dim": "outer"})
ON = {"symmetric_memory": "on"}


class Peers:
    """The other ranks' memory. They do what this rank does, each exchange of one channel behind the
    one before: pack what this one packed, meet, sum what this one packed.

    `meets`: whether this rank waits for them. `per_channel`: slots that exchanges of one channel
    take in turn.
    """

    def __init__(
        self, machine: Machine, own: Tensor, size: int, *, meets: bool = True, per_channel: int = 2
    ) -> None:
        self._machine, self._meets, self._per_channel = machine, meets, per_channel
        self.buffers = [own, *(torch.full_like(own, 0xFF) for _ in range(size - 1))]
        self.streams: dict[int, Stream] = {}
        self._turns: dict[int, int] = {}

    def meet(self, channel: int) -> None:
        if channel not in self.streams:  # when the model is made
            self.streams[channel] = self._machine.new_stream()
            self._turns[channel] = 0
            return
        turn, self._turns[channel] = self._turns[channel], self._turns[channel] + 1
        depth = len(self.streams)
        place = channel + depth * (turn % self._per_channel)
        slots = [part.chunk(2 * depth)[place] for part in self.buffers]
        here, peers = self._machine.current, self.streams[channel]
        join(peers.clock, here.clock)  # they compute what they pack; here it is a copy
        with self._machine.on(peers):
            for slot in slots[1:]:
                slot.copy_(slots[0])
        if self._meets:
            join(here.clock, peers.clock)
        with self._machine.on(peers):
            torch.empty_like(slots[0]).copy_(slots[0])


@contextlib.contextmanager
def reading(machine: Machine, **options: Any) -> Iterator[list[Peers]]:
    """All ranks can read each other's memory; what was opened comes back."""
    opened: list[Peers] = []

    def peers(own: Tensor, group: LoopbackGroup) -> Peers:
        opened.append(Peers(machine, own, group.size(), **options))
        return opened[-1]

    def all_alike(self: Collectives, value: Any) -> list[Any]:
        return [value] * self.world_size

    with (
        mock.patch.multiple(
            peer_memory,
            allocate=lambda nbytes, _: torch.full((nbytes,), 0xFF, dtype=torch.uint8),
            CudaMemory=peers,
            obstacle=lambda _: "",
        ),
        mock.patch.object(Collectives, "gather_objects", all_alike),
    ):
        yield opened


def trained(
    machine: Machine,
    job: Job,
    lanes: Lanes = LANES["in order"],
    sizes: tuple[int, ...] = (2,),
    **options: Any,
) -> list[Tensor]:
    """The main parameters of a job by symmetric memory; options: of `Peers`."""
    with reading(machine, **options) as opened:

        def find(runtime: Runtime) -> list[Tensor]:
            # The driver frees memory when all that has mapped it let go.
            for stream in [stream for peers in opened for stream in peers.streams.values()]:
                join(machine.streams[0].clock, stream.clock)
            return mains_of(runtime)

        job = job.but(options={**job.options, **ON})
        found = run(machine, job, lanes, sizes=sizes, find=find)
        assert len(opened) == len(sizes)
        return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    assert all(tensor.isfinite().all() for tensor in first)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def hazards(job: Job, lanes: Lanes, sizes: tuple[int, ...] = (2,), **options: Any) -> set[str]:
    machine = Racing()
    trained(machine, job, lanes, sizes, **options)
    return {*machine.hazards, *machine.early_frees}


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_conflict_between_ranks_is_ordered(job: Job, lanes: Lanes) -> None:
    assert hazards(job, lanes) == set()


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_every_conflict_along_two_axes_is_ordered(lanes: Lanes) -> None:
    assert hazards(HSDP, lanes, (2, 2)) == set()


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_sums_wait_for_packs(lanes: Lanes) -> None:
    job = JOBS["zero3"]
    expected = run(Machine(), job, SERIAL)
    assert same(expected, trained(Late(side_first=True), job, lanes))
    assert not same(expected, trained(Late(side_first=True), job, lanes, meets=False))
    found = hazards(job, lanes, meets=False)
    assert any(
        "is not ordered after a write by aten::copy_ on stream" in hazard for hazard in found
    )


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_packs_wait_for_sums(lanes: Lanes) -> None:
    original = Slots.__init__

    def one_slot(self: Slots, *args: Any, depth: int, **kwargs: Any) -> None:
        original(self, *args, depth=depth, **kwargs)
        self.count = depth

    with mock.patch.object(Slots, "__init__", one_slot):
        found = hazards(JOBS["zero3"], lanes, per_channel=1)
    assert any("is not ordered after a read by aten::copy_ on stream" in hazard for hazard in found)
