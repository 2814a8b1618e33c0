"""The network of a bench as data: its namespaces, and the commands that make and remove them.

    two ranks      rank 0  lan ======= lan  rank 1                        one veth pair
    more           rank r  lan ======= port<r>  switch                    a pair each, one bridge

Each rank has a namespace and in it one interface, `lan`, with an address that exists there alone;
the bridge of more ranks is in one more namespace, so the machine's own is left as it is. Both ends
of every pair send through a token bucket of the rate that was asked for: a rank's sends and what it
receives are limited apart from each other, as on a full-duplex link.

    namespace      sidestream-<pid>-<start>-<role>        of the process that made it

pid and start (in clock ticks since the machine's) together are no other process's, so what a killed
run left is told from what is in use. Rates are bits a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

INTERFACE = "lan"
MIN_RANKS, MAX_RANKS = 2, 64
_SWITCH = "switch"
# What may leave at once: at least one packet as the kernel hands it to a link, which is up to
# 64 KiB, or it is cut into small ones at the cost of a core.
_LEAST_BURST_BYTES = 128 << 10
_BURST_S = 1e-3
# How long a packet may wait for its turn before it is dropped, as in a switch with small buffers.
_LATENCY = "20ms"
_NAME = re.compile(r"sidestream-(\d+)-(\d+)-(?:rank\d+|switch)")

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that makes a network: `start_ticks` is when it began, as in /proc/<pid>/stat."""

    pid: int
    start_ticks: int

    def namespace(self, role: str) -> str:
        """The name of one of its namespaces."""
        return f"sidestream-{self.pid}-{self.start_ticks}-{role}"


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """What to run, in order. `ranks`: the namespace of each; `namespaces`: all, as they are
    made.
    """

    ranks: tuple[str, ...]
    namespaces: tuple[str, ...]
    make: tuple[Command, ...]


def removal(namespace: str) -> Command:
    """The command that removes it, with its interfaces and their shaping."""
    return ("ip", "netns", "delete", namespace)


def plan_network(owner: Owner, num_ranks: int, bits_per_s: int) -> NetworkPlan:
    """The network of `num_ranks` ranks (2 to 64) whose links carry `bits_per_s` each way."""
    assert MIN_RANKS <= num_ranks <= MAX_RANKS, num_ranks
    ranks = tuple(owner.namespace(f"rank{rank}") for rank in range(num_ranks))
    if num_ranks == MIN_RANKS:
        namespaces, cables = ranks, _cable((ranks[0], INTERFACE), (ranks[1], INTERFACE))
        ends = [(name, INTERFACE) for name in ranks]
    else:
        switch = owner.namespace(_SWITCH)
        namespaces, cables, ends = (*ranks, switch), _bridge(switch), []
        for rank, name in enumerate(ranks):
            near, far = (name, INTERFACE), (switch, f"port{rank}")
            cables += _cable(near, far)
            cables.append(_ip(switch, "link", "set", far[1], "master", _SWITCH))
            ends += [near, far]
    make: list[Command] = [("ip", "netns", "add", name) for name in namespaces]
    make += cables
    make += [
        _ip(name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
        for rank, name in enumerate(ranks)
    ]
    make += [_ip(name, "link", "set", interface, "up") for name, interface in ends]
    make += [_shaping(name, interface, bits_per_s) for name, interface in ends]
    return NetworkPlan(ranks=ranks, namespaces=namespaces, make=tuple(make))


def left_behind(names: Iterable[str], is_alive: Callable[[Owner], bool]) -> list[str]:
    """Which namespaces were made by a process of ours that has ended."""
    found = [(name, _NAME.fullmatch(name)) for name in names]
    return [
        name for name, parts in found if parts and not is_alive(Owner(int(parts[1]), int(parts[2])))
    ]


def _cable(near: tuple[str, str], far: tuple[str, str]) -> list[Command]:
    """A veth pair between two (namespace, interface)."""
    ends = ("netns", near[0], "type", "veth", "peer", "name", far[1], "netns", far[0])
    return [("ip", "link", "add", near[1], *ends)]


def _bridge(switch: str) -> list[Command]:
    return [
        _ip(switch, "link", "add", _SWITCH, "type", "bridge"),
        _ip(switch, "link", "set", _SWITCH, "up"),
    ]


def _shaping(namespace: str, interface: str, bits_per_s: int) -> Command:
    burst = max(_LEAST_BURST_BYTES, round(bits_per_s / 8 * _BURST_S))
    bucket = ("tbf", "rate", f"{bits_per_s}bit", "burst", f"{burst}", "latency", _LATENCY)
    return ("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _ip(namespace: str, *words: str) -> Command:
    return ("ip", "-n", namespace, *words)
