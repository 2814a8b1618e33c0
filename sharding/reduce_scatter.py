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
from ..kernels.checks import SOURCE_DTYPES, check_contiguous, check_device, check_dtype, check_like
from .arguments import kind_of, require_flag, require_member
from .collectives import Channel, Pending, Traffic
from .data_parallel_groups import Axis
from .lanes import DONE, Event, Lane, make_lane
from .uses import Uses
from .wire import PlainWire


class ReduceScatterWork:
    """A reduce-scatter under way. Keep it until `wait` has returned: it owns what is in flight."""

    event: Event = DONE

    def __init__(
        self, name: str, tensors: Sequence[Tensor], channel: Channel, scale: float
    ) -> None:
        """tensors: the output and the input, and memory for what arrives, if there is some."""
        self._held: list[Tensor] = [tensor.detach().view(-1) for tensor in tensors]
        self._name, self._channel, self._scale = name, channel, scale
        self._wire = PlainWire(tensors[1].dtype)

    def wait(self) -> None:
        """Order the caller's following work after the sum: on CUDA the current stream waits, and on
        a CPU the caller, who also sums. Again, it only orders the stream that is current then.

        Raises:
            CommunicationError: the exchange failed, for example because a rank died.
        """
        self.event.wait()
        self._held = []

    def exchange(self) -> Sequence[Pending]:
        """The first stage: start to bring what the ranks have for us."""
        output, sent, *scratch = self._held
        numel = self._channel.received_parts * output.numel()
        # Without scratch allocated where the lane runs, which owns it.
        received = (scratch[0] if scratch else sent.new_empty(numel))[:numel]
        self._held = [output, sent, received]
        return self._wire.exchange(self._channel, received, sent, self._name)

    def sum(self) -> Sequence[Pending]:
        """The second stage: add it up."""
        output, sent, received = self._held
        table = received.view(-1, output.numel())
        rows = self._wire.rows(self._channel, table.unbind(), sent)
        whole = table if len(rows) == len(table) else None
        if whole is None and output.untyped_storage()._cdata == sent.untyped_storage()._cdata:
            # Our own part stayed where it is, and the first partial sums would overwrite it.
            rows[self._channel.rank] = rows[self._channel.rank].clone()
        self._wire.reduce(output, rows, table=whole, scale=self._scale)
        return ()


def reduce_scatter_with_fp32_accumulation(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    scratch: Tensor | None = None,
    lane: Lane | None = None,
    name: str = "reduce-scatter with FP32 accumulation",
) -> ReduceScatterWork | None:
    """Fill `output` with the sum, or the average, of all ranks' parts of `input` for this rank.

    output = round((part of rank 0 + part of rank 1 + ...) * scale), all in FP32; scale: 1 for SUM,
    1/world in FP32 for AVG. output [any shape, n elements]: of the dtype of `input`, or FP32; it
    may lie in `input`, as this rank's own part does. input [any shape, world * n elements]: FP32,
    BF16 or FP16. Both contiguous, plain and on one device. group: None is all ranks. scratch:
    memory like `input`, for what arrives, that shares none with it or `output`; None allocates it
    for the while. lane (`lanes.make_lane`): where it runs, for those who start many; None is one
    of its own, on CUDA a stream beside the current one if `async_op`. name: for errors and traces.
    Nothing is remembered between calls, so any number may be under way, in any groups, if all ranks
    start them in one order.

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
    work = ReduceScatterWork(name, held, channel, _scale_of(op, channel.size))
    if output.numel():
        lane = lane or make_lane(output.device, async_op)
        work.event = lane.submit(name, work.exchange, work.sum)
    if async_op:
        return work
    work.wait()
    return None


def _channel(group: dist.ProcessGroup | None, device: torch.device) -> Channel:
    """Between the ranks of `group`, for tensors on `device`."""
    group = require_member(group)
    ranks = dist.get_process_group_ranks(group)
    axis = Axis("group", ranks, dist.get_rank(group), group, group)
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
    named = {"output": output, "input": sent, **({} if scratch is None else {"scratch": scratch})}
    for name, tensor in named.items():
        check_dtype(name, tensor, SOURCE_DTYPES)
        if type(tensor) not in PLAIN_TYPES:
            raise TypeError(
                f"{name}: expected a plain tensor, got {kind_of(tensor)}; pass its local part"
            )
        check_contiguous(name, tensor)
        check_device(name, tensor, output.device)
    check_dtype("output", output, tuple(dict.fromkeys((sent.dtype, torch.float32))))
    if scratch is not None:
        flat = scratch.view(-1)
        check_like("scratch", flat, (sent.numel(),), sent.dtype, output.device)
        check_apart({"scratch": flat}, {"input": sent, "output": output})
    return [*named.values()]


def _check_sizes(output: Tensor, sent: Tensor, world_size: int) -> None:
    if sent.numel() != world_size * output.numel():
        raise ValueError(
            f"input: expected {world_size} parts, one for each rank, of {output.numel()} elements "
            f"as output has, got {sent.numel()} elements; pad the input to a multiple of "
            f"{world_size} and pass an output of a part"
        )
