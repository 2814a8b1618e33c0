"""What a sharded model costs: bytes at rest and at peak on this rank, and bytes on the wire per
step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .expert_ranks import ModelRanks
from .fully_shard import runtime_of
from .memory import Depth, StreamBytes, UnitBytes, stream_bytes
from .modules.tree_watch import watches_of
from .routes import routes, symmetric_bytes
from .runtime import Runtime
from .unit import Unit
from .use_order import UnitGroup


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """One unit's row. Bytes are this rank's; `sent_bytes` are what it sends to other ranks in one
    step with one backward, `sent_bytes_by_axis` the same for each axis of the mesh. `wire`,
    `param_wire`: in what gradients travel, and parameters. `residual_bytes`: what the wire keeps.
    `exchange`: what gradients go by, "messages", "symmetric memory" or, on one rank, "none".
    """

    name: str
    num_params: int
    numel: int
    compute_dtype: torch.dtype
    wire: str
    wire_dtype: torch.dtype
    param_wire: str
    main_bytes: int
    compute_bytes_at_rest: int
    grad_bytes: int
    residual_bytes: int
    gathered_bytes: int
    gathers_per_step: int
    exchanges_per_step: int
    exchange: str
    sent_bytes: int
    sent_bytes_by_axis: Mapping[str, int]

    @property
    def bytes_at_rest(self) -> int:
        """Parameters, gradients and what wires keep, between steps, after the first; no optimizer
        state. The next forward frees gradients that were cleared.
        """
        return self.main_bytes + self.compute_bytes_at_rest + self.grad_bytes + self.residual_bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """`print` it for a table; read the fields to plan. `axes`: how many ranks along each.
    `exchanges`: what sums along each go by, "symmetric memory" or "messages", and why.

    `peak_bytes` has parameters, reduced gradients and buffers, `bytes_at_rest` what of these stays;
    both have symmetric memory, `stream_peaks.symmetric` of it. Beside it lie activations, optimizer
    state, `stream_peaks.unpacked` of gradients that were not packed yet, and on a GPU what each of
    `num_communicators` takes, outside torch's allocator.
    """

    strategy: str
    axes: Mapping[str, int]
    exchanges: Mapping[str, str]
    units: tuple[UnitSummary, ...]
    bytes_at_rest: int
    peak_bytes: int
    stream_peaks: StreamBytes
    num_communicators: int
    on_gpu: bool
    sent_bytes_per_step: int
    sent_bytes_by_axis: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """How many data-parallel ranks there are."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        header = (
            "unit",
            "tensors",
            "elements",
            "compute",
            "gathered in",
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
                    unit.param_wire,
                    unit.wire,
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
        by_axis = ", ".join(
            f"{_mib(self.sent_bytes_by_axis.get(name, 0))} of it along {name} ({size})"
            for name, size in self.axes.items()
            if len(self.axes) > 1
        )
        lines.append(
            f"{self.strategy}, world {self.world_size}, {numel:,} elements; per rank: "
            f"{_mib(self.bytes_at_rest)} at rest (parameters and gradients, without optimizer "
            f"state), at most {_mib(self.peak_bytes)} with buffers (under no_sync a full gradient "
            f"more), {_mib(self.sent_bytes_per_step)} sent per step" + (by_axis and f": {by_axis}")
        )
        lines.append(self._beside())
        lines += [
            f"exchange along {name}: {by}"
            for name, by in self.exchanges.items()
            if self.axes[name] > 1
        ]
        return "\n".join(lines)

    def _beside(self) -> str:
        peaks = self.stream_peaks
        text = f"beside that at most {_mib(peaks.unpacked)} of gradients before they are packed"
        if not self.on_gpu:
            return text
        return (
            f"{text}; by streams, which do not share what they freed: compute "
            f"{_mib(peaks.compute)} with these, gathers {_mib(peaks.gather)}, exchanges "
            f"{_mib(peaks.reduce)}; and what {self.num_communicators} communicators take outside "
            "torch's allocator"
        )


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
    rows = tuple(_row(unit, group) for group in runtime.groups for unit in group.units)
    symmetric = symmetric_bytes(runtime.ranks.dense)
    at_rest = sum(row.bytes_at_rest for row in rows) + symmetric
    peaks = _peaks(runtime, rows, symmetric)
    return Summary(
        strategy=runtime.options.strategy,
        axes={c.axis.name: c.size for c in runtime.ranks.dense.channels},
        exchanges=routes(runtime.ranks.dense),
        units=rows,
        bytes_at_rest=at_rest,
        peak_bytes=peaks.total - peaks.unpacked,
        stream_peaks=peaks,
        num_communicators=_num_communicators(runtime.ranks),
        on_gpu=runtime.pool.device.type == "cuda",
        sent_bytes_per_step=sum(row.sent_bytes for row in rows),
        sent_bytes_by_axis=dict(sum((Counter(row.sent_bytes_by_axis) for row in rows), Counter())),
    )


def _row(unit: Unit, group: UnitGroup) -> UnitSummary:
    spec, buffers = unit.spec, unit.buffers
    uses = 2 if buffers.frees and group.reshard_after_forward else 1
    sent = buffers.way.sent_bytes(uses)
    is_gathered = bool(sent)
    if unit.reduction.is_needed:
        sent += unit.reduction.sent_bytes()
    return UnitSummary(
        name=spec.name,
        num_params=len(spec.names),
        numel=sum(segment.numel for segment in spec.layout.segments),
        compute_dtype=spec.dtypes.compute,
        wire=spec.wires[0].name,
        wire_dtype=spec.wires[0].dtype,
        param_wire=spec.param_wire or _dtype_name(spec.dtypes.compute),
        main_bytes=buffers.main.nbytes,
        compute_bytes_at_rest=buffers.way.rest_bytes,
        grad_bytes=unit.gradients.grad.nbytes if unit.reduction.is_needed else 0,
        residual_bytes=0 if (residual := unit.reduction.residual) is None else residual.nbytes,
        gathered_bytes=buffers.gathered.nbytes if buffers.frees else 0,
        gathers_per_step=uses if is_gathered else 0,
        exchanges_per_step=int(unit.reduction.is_needed),
        exchange=next((one.channel.route for one in unit.reduction.sums), "none"),
        sent_bytes=sent.total(),
        sent_bytes_by_axis=dict(sent),
    )


def _peaks(runtime: Runtime, rows: tuple[UnitSummary, ...], symmetric: int) -> StreamBytes:
    # A CPU's pack has ended when the next unit's gradients come; a GPU's holds them until then.
    unpacked = 2 if runtime.pool.device.type == "cuda" else 1
    depth = Depth(runtime.prefetch, runtime.max_exchanges, unpacked)
    units = [
        _unit_bytes(unit, group, rows[unit.spec.index])
        for group in runtime.groups
        for unit in group.units
    ]
    return stream_bytes(units, depth, symmetric=symmetric)


def _unit_bytes(unit: Unit, group: UnitGroup, row: UnitSummary) -> UnitBytes:
    reduces = unit.reduction.is_needed
    return UnitBytes(
        group=group.index,
        stays=group.is_root or not group.reshard_after_forward,
        is_last=group.is_root,
        at_rest=row.main_bytes + row.compute_bytes_at_rest + row.residual_bytes,
        gathered=row.gathered_bytes + unit.buffers.way.gathering_bytes,
        reduced=row.grad_bytes,
        exchanging=unit.reduction.peak_bytes() if reduces else 0,
        unpacked=row.numel * row.compute_dtype.itemsize if reduces else 0,
    )


def _num_communicators(ranks: ModelRanks) -> int:
    """How many communicators the model uses, each of which has buffers of its own."""
    used = [ranks.dense.groups.group, ranks.experts.groups.group]
    used += [g for one in ranks.channels for g in (one.axis.gather, one.axis.reduce)]
    return len({id(group) for group in used if group is not None})
