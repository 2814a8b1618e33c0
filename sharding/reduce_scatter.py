"""`dist.reduce_scatter_tensor` with a sum of our own: low precision on the wire, FP32 in the sum.

    exchange    part r of every rank's `input` goes to rank r, in the dtype of `input`
    sum         in FP32, in the order of the group's ranks, times 1 or 1/world, rounded once

A ring in low precision rounds an element at every rank that it passes; as many bytes travel. The
messages and the sum are those of a sharded model: a `Channel`, a `PlainWire`, a lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.aliasing import PLAIN_TYPES, check_apart
from ..kernels.checks import SOURCE_DTYPES, check_contiguous, check_device, check_dtype
from .arguments import kind_of, require_flag
from .collectives import Channel, Pending, Traffic
from .data_parallel_groups import Axis
from .lanes import DONE, Event, Lane, make_lane
from .uses import Uses
from .wire import PlainWire

_WHAT = "reduce-scatter with FP32 accumulation"


class ReduceScatterWork:
    """A reduce-scatter under way. Keep it until `wait` has returned: it owns what is in flight."""

    def __init__(self, event: Event, held: Sequence[Tensor]) -> None:
        """held: what the operations read and write."""
        self._event = event
        self._held = held

    def wait(self) -> None:
        """Order the caller's following work after the sum: on CUDA the current stream waits, and on
        a CPU the caller, who also sums. Again, it only orders the stream that is current then.

        Raises:
            CommunicationError: the exchange failed, for example because a rank died.
        """
        self._event.wait()
        self._held = ()


def reduce_scatter_with_fp32_accumulation(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    scratch: Tensor | None = None,
    lane: Lane | None = None,
) -> ReduceScatterWork | None:
    """Fill `output` with the sum, or the average, of all ranks' parts of `input` for this rank.

    output = round((part of rank 0 + part of rank 1 + ...) * scale), all in FP32; scale: 1 for SUM,
    1/world in FP32 for AVG. output [any shape, n elements]: of the dtype of `input`, or FP32; it
    may lie in `input`, as this rank's own part does. input [any shape, world * n elements]: FP32,
    BF16 or FP16. Both contiguous, plain and on one device. group: None is all ranks. scratch:
    memory like `input`, for what arrives, that shares none with it or `output`; None allocates it
    for the while. lane (`lanes.make_lane`): where it runs, for those who start many; None is one
    of its own, on CUDA a stream beside the current one if `async_op`. Nothing is remembered between
    calls, so any number may be under way, in any groups, if all ranks start them in one order.

    Returns what `wait` is called of if `async_op`, else None. Until then nothing may write `input`
    or `scratch`, or read `output`.

    Raises:
        TypeError: no plain tensors, or an `async_op` that is no bool.
        ValueError: an op, shapes, dtypes, devices or memory that do not fit, a group without this
            rank; before anything is sent.
        CommunicationError: the exchange failed.
    """
    require_flag("async_op", async_op)
    held = _checked(output, input, scratch)
    channel = _channel(group, output.device)
    _check_sizes(output, input, channel.size)
    total = _Sum(held, channel, _scale_of(op, channel.size))
    event: Event = DONE
    if output.numel():
        lane = lane or make_lane(output.device, async_op)
        event = lane.submit(_WHAT, total.exchange, total.sum)
    work = ReduceScatterWork(event, held)
    if async_op:
        return work
    work.wait()
    return None


class _Sum:
    """The two stages of one."""

    def __init__(self, tensors: Sequence[Tensor], channel: Channel, scale: float) -> None:
        """tensors: the output and the input, and memory for what arrives, if there is some."""
        self._output, self._sent, *scratch = [tensor.detach().view(-1) for tensor in tensors]
        self._scratch = scratch[0] if scratch else None
        self._channel, self._scale = channel, scale
        self._wire = PlainWire(self._sent.dtype)

    def exchange(self) -> Sequence[Pending]:
        """Start to bring what the ranks have for us."""
        numel = self._channel.received_parts * self._output.numel()
        if self._scratch is None:  # allocated where the lane runs, which owns it
            self._scratch = self._sent.new_empty(numel)
        self._scratch = self._scratch[:numel]
        return self._wire.exchange(self._channel, self._scratch, self._sent, _WHAT)

    def sum(self) -> Sequence[Pending]:
        """Add it up."""
        channel, output, received = self._channel, self._output, self._scratch
        assert received is not None
        table = received.view(-1, output.numel())
        rows = self._wire.rows(channel, table.unbind(), self._sent)
        if len(rows) > len(table) and _may_meet(output, self._sent):
            # Our own part stayed where it is, and the first partial sums would overwrite it.
            rows[channel.rank] = rows[channel.rank].clone()
        whole = table if len(rows) == len(table) else None
        self._wire.reduce(output, rows, table=whole, scale=self._scale)
        return ()


def _may_meet(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _channel(group: dist.ProcessGroup | None, device: torch.device) -> Channel:
    """Between the ranks of `group`, for tensors on `device`."""
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0 or group is None:
        raise ValueError(
            "group: expected one that this rank is in, got one without it; call it on the group's "
            "own ranks alone"
        )
    axis = Axis("group", dist.get_process_group_ranks(group), rank, group, group)
    return Channel(axis, device, Traffic(), Uses())


def _scale_of(op: dist.ReduceOp.RedOpType, world_size: int) -> float:
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    raise ValueError(
        f"op: expected ReduceOp.SUM or ReduceOp.AVG, got {op}; use dist.reduce_scatter_tensor for "
        "others, which sums as its backend does"
    )


def _checked(output: Tensor, sent: Tensor, scratch: Tensor | None) -> list[Tensor]:
    """Those that there are, if they fit."""
    named = {"output": output, "input": sent}
    if scratch is not None:
        named["scratch"] = scratch
    for name, tensor in named.items():
        check_dtype(name, tensor, SOURCE_DTYPES)
        if type(tensor) not in PLAIN_TYPES:
            raise TypeError(
                f"{name}: expected a plain tensor, got {kind_of(tensor)}; pass its local part"
            )
        check_contiguous(name, tensor)
        check_device(name, tensor, output.device)
    if output.dtype not in (sent.dtype, torch.float32):
        raise ValueError(
            f"output: expected {sent.dtype}, as input has, or torch.float32, got {output.dtype}; "
            "round the sum to others afterwards"
        )
    if scratch is not None:
        if (scratch.numel(), scratch.dtype) != (sent.numel(), sent.dtype):
            raise ValueError(
                f"scratch: expected {sent.numel()} elements of {sent.dtype}, as input has, got "
                f"{scratch.numel()} of {scratch.dtype}; pass memory like the input"
            )
        check_apart({"scratch": scratch}, {"input": sent, "output": output})
    return list(named.values())


def _check_sizes(output: Tensor, sent: Tensor, world_size: int) -> None:
    if sent.numel() != world_size * output.numel():
        raise ValueError(
            f"input: expected {world_size} parts, one for each rank, of {output.numel()} elements "
            f"as output has, got {sent.numel()} elements; pad the input to a multiple of "
            f"{world_size} and pass an output of a part"
        )
