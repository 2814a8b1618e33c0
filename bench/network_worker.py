"""What a rank does in `sidestream bench network`: all trainers in one process, in turn.

    each round, in an order drawn anew:    trainer | trainer | trainer | ...
    of each:                               barrier | steps | barrier        (the timed span)

Noise of the machine thus falls on all alike. A rank trains on one batch again and again, so that
the loss falls within a few steps, where text drawn at random has nothing to be learnt.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .models import DecoderConfig, build_batch
from .network_namespaces import read_sent_bytes
from .network_trainers import build_network_trainer
from .rivals import Setup
from .timing import frozen_heap, shuffled_order

# DDP rebuilds its buckets after the first step and sidestream has recorded the order of its units.
WARM_UP_ROUNDS = 2
_LINK_S = 0.5
_MAX_LINK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class NetworkCase:
    """Which trainers take how many steps over links of `bits_per_s`; `label` is said of it on the
    error output. prefetch: units that ours gather ahead.
    """

    label: str
    bits_per_s: int
    trainers: tuple[str, ...]
    config: DecoderConfig
    dtype: torch.dtype
    rounds: int
    steps: int
    prefetch: int = 1

    @property
    def steps_of_each(self) -> int:
        """What a trainer has taken at the end, those of the warm-up among them."""
        return (WARM_UP_ROUNDS + self.rounds) * self.steps


@dataclass(frozen=True, kw_only=True)
class TrainerSeen:
    """One trainer on one rank, in order of rounds.

    seconds: a step, the mean over the steps of a round. sent_bytes: a step, through the rank's
    interface, headers and the barrier's few included. loss: of the last step.
    """

    seconds: list[float]
    sent_bytes: list[float]
    counted_bytes: int | None
    loss: float


@dataclass(frozen=True, kw_only=True)
class RankSeen:
    """What one rank saw. link_bits_per_s: what its link carried when all sent and nothing else
    happened.
    """

    link_bits_per_s: float
    trainers: dict[str, TrainerSeen]


def work_on_network(rank: int, case: NetworkCase) -> RankSeen:
    """Measure the link, then train with every trainer of `case` in turn."""
    link_bits_per_s = _measure_link(case.bits_per_s)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    setup = Setup(mesh=mesh, dtype=case.dtype, prefetch=case.prefetch)
    batch = build_batch(case.config, seed=rank)
    turns = {name: _Turns(name, case, setup, batch) for name in case.trainers}
    with frozen_heap():
        _take_turns(turns, case, WARM_UP_ROUNDS, "warm-up")
        for each in turns.values():
            each.seconds.clear()
            each.sent_bytes.clear()
        _take_turns(turns, case, case.rounds, "round")
    return RankSeen(
        link_bits_per_s=link_bits_per_s,
        trainers={name: each.seen() for name, each in turns.items()},
    )


def _take_turns(turns: dict[str, _Turns], case: NetworkCase, rounds: int, what: str) -> None:
    order = shuffled_order(case.trainers, rounds)
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        for _ in case.trainers:
            turns[next(order)].take()
        if dist.get_rank() == 0:
            spent_s = time.perf_counter() - start
            print(
                f"{case.label}: {what} {number} of {rounds} took {spent_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )


class _Turns:
    """A trainer and what was measured of it."""

    def __init__(
        self, name: str, case: NetworkCase, setup: Setup, batch: tuple[Tensor, Tensor]
    ) -> None:
        self._trainer = build_network_trainer(name, case.config, setup)
        self._batch = batch
        self._steps = case.steps
        self._loss = torch.empty(0)
        self.seconds: list[float] = []
        self.sent_bytes: list[float] = []

    def take(self) -> None:
        """The steps of one round, from when every rank is ready to when every rank is done."""
        dist.barrier()
        sent, start = read_sent_bytes(), time.perf_counter()
        for _ in range(self._steps):
            self._loss = self._trainer.step(*self._batch)
        dist.barrier()
        self.seconds.append((time.perf_counter() - start) / self._steps)
        self.sent_bytes.append((read_sent_bytes() - sent) / self._steps)

    def seen(self) -> TrainerSeen:
        """All of it."""
        return TrainerSeen(
            seconds=self.seconds,
            sent_bytes=self.sent_bytes,
            counted_bytes=self._trainer.counted_bytes,
            loss=self._loss.item(),
        )


def _measure_link(bits_per_s: int) -> float:
    """Bits a second that this rank sends to the next one, and gets from the one before, while all
    do: the better of two tries, since in the first TCP looks for its pace. Each lasts half a
    second, or as long as 64 MiB take.
    """
    numel = min(_MAX_LINK_BYTES, round(bits_per_s / 8 * _LINK_S))
    outgoing = torch.zeros(numel, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    return numel * 8 / min(_pass_on(outgoing, incoming) for _ in range(2))


def _pass_on(outgoing: Tensor, incoming: Tensor) -> float:
    """Seconds that all need to send to the next rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    start = time.perf_counter()
    pending = [
        dist.irecv(incoming, (rank - 1) % world),
        dist.isend(outgoing, (rank + 1) % world),
    ]
    for work in pending:
        assert work is not None
        work.wait()
    dist.barrier()
    return time.perf_counter() - start
