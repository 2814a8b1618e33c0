"""A training step in virtual time: every stream has a clock, kernels and links take what their
bytes need, the host takes no time. What runs is the runtime itself.

    8B model     32 blocks of 218 million parameters, bf16: 436 MB; where it is asked for, an
                 embedding and a head of 525 million each
    kernels      2.5 TB/s, of what they read and write
    NVLink       350 GB/s, InfiniBand 50 GB/s a GPU, of what leaves a GPU or, across nodes, a node:
                 7/8 of a buffer with 8 GPUs a node or 8 nodes

Nobody measured these: they say what a schedule can hide. Each communicator has its links to itself
and carries one collective at a time.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sidestream as ss
from sidestream.bench.virtual_streams import LoopbackGroup, Machine, Stream
from sidestream.tests.sharding.on_streams import LANES, Along, Lanes, sharding

NVLINK_GBPS, INFINIBAND_GBPS, MEMORY_GBPS = 350.0, 50.0, 2500.0
LEAVES = 7 / 8
BLOCKS, BLOCK_NUMEL, TABLE_NUMEL = 32, 218_112_000, 525_336_576
STEPS = 2  # in the first one the order of use is not known yet


@dataclass(frozen=True)
class Link:
    """GB/s of gathers and of exchanges along one axis of `ranks`."""

    ranks: int
    gather_gbps: float
    exchange_gbps: float


@dataclass(frozen=True)
class Cluster:
    """Links, the first axis first. `forward_ms`, `backward_ms`: compute of a block."""

    links: tuple[Link, ...]
    forward_ms: float
    backward_ms: float

    @property
    def compute_ms(self) -> float:
        """A step without any communication."""
        return BLOCKS * (self.forward_ms + self.backward_ms)

    @property
    def numel(self) -> int:
        """Elements of a block's stand-in: 128 for each rank."""
        return 128 * math.prod(link.ranks for link in self.links)


class TimedStream(Stream):
    """Events are times in ms."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0

    def record_event(self) -> Any:
        return self.now_ms

    def wait_event(self, event: Any) -> None:
        self.now_ms = max(self.now_ms, event)

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.now_ms)


class Timed(Machine):
    """Lanes take time by bytes, the compute stream what `compute` is told."""

    def __init__(self, numel: int) -> None:
        """An element of a block of `numel` parameters stands for `BLOCK_NUMEL / numel`."""
        super().__init__(TimedStream)
        self._scale = BLOCK_NUMEL / numel
        self._gbps: dict[LoopbackGroup, float] = {}
        self._free_ms: dict[LoopbackGroup, float] = {}

    def connect(self, along: Along, links: tuple[Link, ...]) -> None:
        """Give the groups their links."""
        for (gathers, reductions), link in zip(along, links, strict=True):
            self._gbps[gathers] = link.gather_gbps
            self._gbps[reductions] = link.exchange_gbps

    @property
    def now_ms(self) -> float:
        """How far the compute stream is."""
        return self._now().now_ms

    def compute(self, ms: float) -> None:
        """The compute stream works for `ms`."""
        self._now().now_ms += ms

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Nor does a test's own fill of new memory take time.
        if self.current is self.streams[0] or func._schema.name == "aten::fill_":
            return super().launch(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        self._take(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)), MEMORY_GBPS)
        if func._schema.name.startswith("sidestream::"):
            return None  # no value is looked at
        return super().launch(func, args, kwargs)

    def transfer(self, group: LoopbackGroup, kind: str, target: Tensor, part: Tensor) -> None:
        self._now().wait_event(self._free_ms.get(group, 0.0))
        self._take(LEAVES * target.nbytes, self._gbps[group])
        self._free_ms[group] = self._now().now_ms

    def _take(self, nbytes: float, gbps: float) -> None:
        self._now().now_ms += nbytes * self._scale / gbps * 1e-6

    def _now(self) -> TimedStream:
        assert isinstance(self.current, TimedStream)
        return self.current


class Table(nn.Module):
    """An embedding or a head, whose compute takes no time."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.mean()


def _block(machine: Timed, cluster: Cluster) -> type[Table]:
    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            machine.compute(cluster.forward_ms)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            machine.compute(cluster.backward_ms)
            return grad.clone()

    class Block(Table):
        def forward(self, x: Tensor) -> Tensor:
            return Work.apply(super().forward(x))  # type: ignore[no-any-return]

    return Block


def step_ms(
    cluster: Cluster, lanes: Lanes = LANES["in order"], *, tables: str = "none", **policy: Any
) -> float:
    """One ZeRO-3 step, from the end of one optimizer step to that of the next.

    `tables`: "none", "root" (embedding and head belong to the root's unit) or "units" of their own.
    """
    machine = Timed(cluster.numel)
    sizes = [link.ranks for link in cluster.links]
    with sharding(machine, lanes, sizes) as along:
        machine.connect(along, cluster.links)
        block = _block(machine, cluster)
        layers = [block(cluster.numel) for _ in range(BLOCKS)]
        if tables != "none":
            numel = cluster.numel * TABLE_NUMEL // BLOCK_NUMEL
            layers = [Table(numel), *layers, Table(numel)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ss.fully_shard(
            model,
            optimizer,
            fsdp_unit_modules=[block, *([Table] if tables == "units" else [])],
            zero_dp_strategy=3,
            mixed_precision_policy=ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy),
        )
        ends = []
        with machine:
            for _ in range(STEPS):
                model(torch.zeros(2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ends.append(machine.now_ms)
        del model, optimizer, layers
    return ends[-1] - ends[-2]
