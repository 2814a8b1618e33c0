"""A cluster's links, and what collectives move over them.

    nvlink    inside a node, a GPU's own; GB/s one way
    nic       between nodes, a GPU's own; GB/s one way

Of a buffer of n bytes over N ranks in nodes of R of them (R = 1: one of each node):

    collective     as                    over a GPU's NVLink          over its NIC
    all-gather     NCCL's rings: each    n (N-1)/N (R-1)/R; all of    n (N-1)/N / R
                   GPU hands on all      it where N = R
                   parts but one, over
                   R rings a NIC each
    all-to-all     a message a peer      n (R-1)/N                    n (N-R)/N

Each of them waits N - 1 times for a message's latency: the steps of a ring follow each other, and
messages are issued one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .virtual_time import Work

NVLINK, NIC = "nvlink", "nic"


@dataclass(frozen=True, slots=True)
class Span:
    """How many ranks a group has, and how many of them a node has."""

    ranks: int
    per_node: int

    def gather(self, nbytes: float, latency_ms: float) -> Work:
        """An all-gather into `nbytes` a rank."""
        passed = nbytes * (self.ranks - 1) / self.ranks
        away = passed / self.per_node if self.ranks > self.per_node else 0.0
        return self._work(passed - away, away, latency_ms)

    def exchange(self, nbytes: float, latency_ms: float) -> Work:
        """An all-to-all of `nbytes` a rank."""
        part = nbytes / self.ranks
        inside, away = self.per_node - 1, self.ranks - self.per_node
        return self._work(inside * part, away * part, latency_ms)

    def _work(self, inside: float, away: float, latency_ms: float) -> Work:
        return Work(latency_ms * (self.ranks - 1), {NVLINK: inside, NIC: away})


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` of `per_node` GPUs."""

    nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Exchange:
    """`splits`: a first axis inside nodes, a second across them. `options`: of `fully_shard`."""

    splits: bool
    options: Mapping[str, str] = field(default_factory=dict)

    def spans(self, cluster: Cluster) -> tuple[Span, ...]:
        """The axes, the first one first."""
        if self.splits:
            return Span(cluster.per_node, cluster.per_node), Span(cluster.nodes, 1)
        return (Span(cluster.world_size, cluster.per_node),)


_OUTER = {"dp_outer_dim": "outer"}
FLAT = "flat"
EXCHANGES: Mapping[str, Exchange] = {
    FLAT: Exchange(splits=False),
    "hierarchical": Exchange(splits=True),
    "hsdp": Exchange(True, {**_OUTER, "outer_dp_sharding_strategy": "no_shard"}),
    "hfsdp": Exchange(True, {**_OUTER, "outer_dp_sharding_strategy": "optim"}),
}
