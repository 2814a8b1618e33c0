"""What a sharded model costs: bytes at rest and at peak on this rank, and bytes on the wire per
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .fully_shard import runtime_of
from .modules.tree_watch import watches_of
from .placements import Placement
from .runtime import Runtime
from .unit import Unit
from .use_order import UnitGroup


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """One unit's row. Bytes are this rank's; `sent_bytes` are what it sends in one step with one
    backward.
    """

    name: str
    num_params: int
    numel: int
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    main_bytes: int
    compute_bytes_at_rest: int
    grad_bytes: int
    gathered_bytes: int
    gathers_per_step: int
    exchanges_per_step: int
    sent_bytes: int

    @property
    def bytes_at_rest(self) -> int:
        """Parameters and gradients between steps, after the first; no optimizer state. The next
        forward frees gradients that were cleared.
        """
        return self.main_bytes + self.compute_bytes_at_rest + self.grad_bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """`print` it for a table; read the fields to plan."""

    strategy: str
    world_size: int
    units: tuple[UnitSummary, ...]
    bytes_at_rest: int
    peak_bytes: int
    sent_bytes_per_step: int

    def __str__(self) -> str:
        header = (
            "unit",
            "tensors",
            "elements",
            "compute",
            "wire",
            "at rest",
            "gathered",
            "gathers",
            "sent/step",
        )
        rows = [header]
        for unit in self.units:
            rows.append(
                (
                    unit.name,
                    f"{unit.num_params}",
                    f"{unit.numel:,}",
                    _dtype_name(unit.compute_dtype),
                    _dtype_name(unit.wire_dtype),
                    _mib(unit.bytes_at_rest),
                    _mib(unit.gathered_bytes),
                    f"{unit.gathers_per_step}",
                    _mib(unit.sent_bytes),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.insert(1, "-" * len(lines[0]))
        numel = sum(unit.numel for unit in self.units)
        lines.append(
            f"{self.strategy}, world {self.world_size}, {numel:,} elements; per rank: "
            f"{_mib(self.bytes_at_rest)} at rest (parameters and gradients, without optimizer "
            f"state), at most {_mib(self.peak_bytes)} with buffers (under no_sync a full gradient "
            f"more), {_mib(self.sent_bytes_per_step)} sent per step"
        )
        return "\n".join(lines)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"


def summary(module: nn.Module) -> Summary:
    """Units, parameters, dtypes, bytes at rest and gathered, and wire bytes per step of a sharded
    module.

    Exact, by arithmetic on the layouts; nothing is run.

    Raises:
        ValueError: `module` is not the one passed to `fully_shard`.
        RuntimeError: it has parameters that it did not have then.
    """
    runtime = runtime_of(module)
    for watch in watches_of(module):
        watch.check()
    world_size = runtime.collectives.world_size
    rows = tuple(_row(unit, group, world_size) for group in runtime.groups for unit in group.units)
    at_rest = sum(row.bytes_at_rest for row in rows)
    return Summary(
        strategy=runtime.units[0].spec.placements.name,
        world_size=world_size,
        units=rows,
        bytes_at_rest=at_rest,
        peak_bytes=at_rest + _transient_bytes(runtime, rows),
        sent_bytes_per_step=sum(row.sent_bytes for row in rows),
    )


def _row(unit: Unit, group: UnitGroup, world_size: int) -> UnitSummary:
    spec, layout, dtypes = unit.spec, unit.spec.layout, unit.spec.dtypes
    placements = spec.placements
    sharded_params = placements.params is Placement.SHARD
    sharded_main = placements.optimizer is Placement.SHARD
    main_numel = layout.shard_numel if sharded_main else layout.numel
    full_bytes = layout.numel * dtypes.compute.itemsize
    compute_bytes, main_bytes = 0, main_numel * dtypes.main.itemsize
    if not sharded_params:
        # With one dtype the main shard is part of the compute copy.
        compute_bytes = full_bytes - main_bytes if dtypes.compute == dtypes.main else full_bytes
    reduces = unit.needs_reduction
    grad_bytes = main_numel * dtypes.grad.itemsize if reduces else 0
    gathers = 0
    if sharded_main:
        gathers = 2 if sharded_params and group.reshard_after_forward else 1
    others = world_size - 1
    sent = gathers * others * layout.shard_numel * dtypes.compute.itemsize
    if reduces:
        sent += others * layout.shard_numel * dtypes.wire.itemsize
        if not sharded_main:
            sent += others * layout.shard_numel * dtypes.grad.itemsize
    return UnitSummary(
        name=spec.name,
        num_params=len(spec.names),
        numel=sum(segment.numel for segment in layout.segments),
        compute_dtype=dtypes.compute,
        wire_dtype=dtypes.wire,
        main_bytes=main_bytes,
        compute_bytes_at_rest=compute_bytes,
        grad_bytes=grad_bytes,
        gathered_bytes=full_bytes if sharded_params else 0,
        gathers_per_step=gathers,
        exchanges_per_step=int(reduces),
        sent_bytes=sent,
    )


def _transient_bytes(runtime: Runtime, rows: tuple[UnitSummary, ...]) -> int:
    """The most that gathered parameters and exchange buffers take at once, under plain use of every
    unit.

    Gathered: what stays from forward to backward, and the largest others, as many as the prefetch
    reaches. Exchanging: the largest, as many as may be in flight, each with what it sends and
    receives.
    """
    gathered, kept = [], 0
    for group in runtime.groups:
        nbytes = sum(rows[unit.spec.index].gathered_bytes for unit in group.units)
        if group.is_root or not group.reshard_after_forward:
            kept += nbytes
        else:
            gathered.append(nbytes)
    ahead = runtime.prefetch + 1
    buffers = sorted((_exchange_bytes(unit, runtime) for unit in runtime.units), reverse=True)
    exchanging = sum(buffers[: runtime.max_exchanges])
    return kept + sum(sorted(gathered, reverse=True)[:ahead]) + exchanging


def _exchange_bytes(unit: Unit, runtime: Runtime) -> int:
    if not unit.needs_reduction:
        return 0
    layout, collectives = unit.spec.layout, runtime.collectives
    received = collectives.received_parts * layout.shard_numel if collectives.world_size > 1 else 0
    return (layout.numel + received) * unit.spec.dtypes.wire.itemsize
