"""How gradients travel is an object: ours, the backend's, and one that a user brings."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sidestream as ss
from sidestream.kernels import (
    message_layout,
    pack_message_,
    reduce_peer_messages_,
    unpack_message_,
)
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.wire import Source
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import options_of

SHAPE = (6, 100)  # 600 elements: parts end in padding at any world


class MessageWire(ss.Wire):
    """A message of a block-scaled format for each rank."""

    dtype = torch.uint8

    def __init__(self, form: str) -> None:
        self.name = f"messages of {form}"
        self.form = form

    def part_numel(self, numel: int) -> int:
        return message_layout(self.form, [numel]).num_bytes

    def pack(self, sent: Tensor, source: Source, parts: int) -> None:
        flat = torch.empty(source.numel)
        source.fill(flat)
        for message, part in zip(sent.chunk(parts), flat.chunk(parts), strict=True):
            pack_message_(message, [part], self.form)

    def reduce(
        self,
        out: Tensor,
        rows: Sequence[Tensor],
        *,
        table: Tensor | None = None,
        scale: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        reduce_peer_messages_(out, rows, self.form, scale=scale, accumulate=accumulate)


def rounded(values: Tensor, form: str, parts: int) -> Tensor:
    """What all ranks decode of one rank's gradients [numel], each part a message."""
    found = torch.empty_like(values)
    for part, decoded in zip(values.chunk(parts), found.chunk(parts), strict=True):
        message = torch.empty(message_layout(form, [part.numel()]).num_bytes, dtype=torch.uint8)
        pack_message_(message, [part], form)
        unpack_message_([decoded], message, form)
    return found


def inputs_of(rank: int) -> Tensor:
    return torch.randn(SHAPE[1], generator=torch.Generator().manual_seed(rank))


def model_with(**options: Any) -> nn.Module:
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    ss.fully_shard(model, **options)
    return model


def backward(model: nn.Module, rank: int) -> Tensor:
    """The reduced gradient of the weight; this rank's own has rows of its inputs."""
    (model(inputs_of(rank)) * torch.arange(1.0, SHAPE[0] + 1)).sum().backward()
    return model.weight.grad.full_tensor()


def gradient_of(rank: int) -> Tensor:
    return torch.arange(1.0, SHAPE[0] + 1)[:, None] * inputs_of(rank)


def messages_train(rank: int, world_size: int, zero: int) -> None:
    policy = ss.MixedPrecisionPolicy(grad_wire=MessageWire("mxfp8"))
    model = model_with(mixed_precision_policy=policy, zero_dp_strategy=zero)
    (unit,) = runtime_of(model).units
    layout = unit.spec.layout
    total = torch.zeros(layout.numel)
    for peer in range(world_size):
        flat = torch.zeros(layout.numel)
        flat[: gradient_of(peer).numel()] = gradient_of(peer).flatten()
        total += rounded(flat, "mxfp8", world_size)
    expected = (total * (1.0 / world_size))[: SHAPE[0] * SHAPE[1]].view(SHAPE)
    assert torch.equal(backward(model, rank), expected)
    assert "messages of mxfp8" in str(ss.summary(model))
    traffic = runtime_of(model).collectives.traffic
    part = message_layout("mxfp8", [layout.shard_numel]).num_bytes
    assert traffic.sent_bytes["exchange"] == (world_size - 1) * part
    # Added to a sum that was exchanged before: twice the gradient.
    assert torch.allclose(backward(model, rank), 2 * expected, rtol=2**-20)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_a_scaled_format_fit(world_size: int, zero: int) -> None:
    run_on_ranks(messages_train, world_size, zero)


def messages_over_two_axes(rank: int, world_size: int) -> None:
    """Sums travel in messages too where the wire is that of partial sums."""
    policy = ss.MixedPrecisionPolicy(grad_wire=MessageWire("mxfp8"), grad_partial_dtype=None)
    grad = backward(model_with(mixed_precision_policy=policy, **options_of("HSDP")), rank)
    mean = torch.stack([gradient_of(peer) for peer in range(world_size)]).mean(0)
    # e4m3 keeps 3 bits, and each element is rounded twice, relative to the largest of its block.
    largest = gradient_of(0).abs().max().item() * 2
    assert (grad - mean).abs().max() <= 2 * 2**-4 * largest
    assert not torch.equal(grad, mean)


def test_messages_travel_along_a_second_axis() -> None:
    run_on_ranks(messages_over_two_axes, 4)


def natively(rank: int, world_size: int, zero: int) -> None:
    model = model_with(reduce="native", zero_dp_strategy=zero)
    grads = torch.stack([gradient_of(peer) for peer in range(world_size)])
    bound = world_size * 2**-23 * grads.abs().sum(0)
    assert ((backward(model, rank) - grads.mean(0)).abs() <= bound).all()
    calls = runtime_of(model).collectives.traffic.calls
    assert calls["reduce_scatter"] == 1 and not calls["exchange"]


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_backend_sums_where_asked(zero: int) -> None:
    run_on_ranks(natively, 3, zero)


def divided(rank: int, world_size: int) -> None:
    grads = torch.stack([gradient_of(peer) for peer in range(world_size)])
    total = torch.zeros(SHAPE)
    for grad in grads:
        total += grad
    for factor in (None, 1.0, 4.0, 0.5):
        found = backward(model_with(gradient_divide_factor=factor), rank)
        assert torch.equal(found, total * (1.0 / (factor or world_size))), factor


def test_gradients_are_divided_as_asked() -> None:
    run_on_ranks(divided, 3)


def partials(rank: int, world_size: int) -> None:
    """Two "nodes" of two: what leaves a node, in FP32 and as wide as the wire."""
    flat = model_with(
        mixed_precision_policy=ss.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    )
    sent = {}
    for partial in (torch.float32, None):
        policy = ss.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16, grad_partial_dtype=partial)
        model = model_with(mixed_precision_policy=policy, ranks_per_node=2, zero_dp_strategy=2)
        found = backward(model, rank)
        between = runtime_of(model).collectives.channels[1].axis.name
        sent[partial] = runtime_of(model).collectives.traffic.axis_bytes[between]
        planned = ss.summary(model).sent_bytes_by_axis
        gathered = runtime_of(model).units[0].buffers.way.sent_bytes(1)
        assert sent[partial] == planned[between] - gathered[between]
        if partial is not None:
            wired = torch.stack(
                [gradient_of(peer).bfloat16().float() for peer in range(world_size)]
            )
            nodes = wired[0] + wired[1], wired[2] + wired[3]
            assert torch.equal(found, (nodes[0] + nodes[1]) * 0.25)
    # Of three others, two are on the other node.
    backward(flat, rank)
    across = runtime_of(flat).collectives.traffic.sent_bytes["exchange"] * 2 / 3
    assert sent[None] <= 0.55 * across and sent[torch.float32] <= across


def test_sums_leave_a_node_once() -> None:
    run_on_ranks(partials, 4)


class NoReduce(ss.Wire):
    name, dtype = "half", torch.float32

    def part_numel(self, numel: int) -> int:
        return numel

    def pack(self, sent: Tensor, source: Source, parts: int) -> None:
        source.fill(sent)


def test_a_wire_must_have_all_that_is_used() -> None:
    with pytest.raises(TypeError, match=r"without reduce; add what is missing"):
        ss.MixedPrecisionPolicy(grad_wire=NoReduce())
    with pytest.raises(TypeError, match=r"a name such as 'bf16' or .*Wire, got int; pass one of"):
        ss.MixedPrecisionPolicy(grad_wire=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got both"):
        ss.MixedPrecisionPolicy(grad_wire=MessageWire("mxfp8"), grad_comm_dtype=torch.bfloat16)
    wired = ss.MixedPrecisionPolicy(grad_wire=MessageWire("mxfp8"))
    with pytest.raises(ValueError, match="reduce: expected 'exact' with"):
        model_with(mixed_precision_policy=wired, reduce="native")
    with pytest.raises(ValueError, match="reduce: expected 'exact' or 'native', got 'fast'"):
        model_with(reduce="fast")


class AnyWire(MessageWire):
    """Whatever it is given in the place of the wire's own."""

    def __init__(self, **changes: Any) -> None:
        super().__init__("mxfp8")
        vars(self).update(changes)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"name": None}, TypeError, "a wire whose name is a str, got None of class AnyWire"),
        ({"dtype": "uint8"}, TypeError, "a wire whose dtype is a dtype, got 'uint8'"),
        ({"part_numel": lambda n: n / 2}, TypeError, r"part_numel\(128\) .* got 64.0; return"),
        ({"part_numel": lambda n: 0}, ValueError, "a whole number of at least 1, got 0; return"),
    ],
    ids=["name", "dtype", "a fraction", "nothing"],
)
def test_what_a_wire_has_is_of_its_kind(
    changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ss.MixedPrecisionPolicy(grad_wire=AnyWire(**changes))


def wires_of_one_name(rank: int, world_size: int) -> None:
    """gloo ends a process that gets more than it expects."""
    others = ({"part_numel": lambda n: 2 * n}, {"dtype": torch.int16}, {"align_numel": 256})
    for other in others:
        wire = AnyWire(**other if rank else {})
        rules = (ss.WireRule(torch.nn.Module, wire),)
        for options in ({"grad_wire": wire}, {"wire_rules": rules}):
            policy = ss.MixedPrecisionPolicy(**options)
            with pytest.raises(
                ValueError, match=r"rank 1: grad_wire is 'messages of mxfp8 of torc"
            ):
                model_with(mixed_precision_policy=policy)


def test_ranks_whose_wires_send_other_bytes_are_told() -> None:
    run_on_ranks(wires_of_one_name, 2)


def fails_in_backward(rank: int, world_size: int) -> None:
    wrong = {
        "fill: expected all of a flat buffer of 768 elements, got 384; fill one": {
            "pack": lambda sent, source, parts: source.fill(torch.empty(source.numel // 2))
        },
        r"expected exchange\(\) of AnyWire\('messages of mxfp8'\) to return the operations": {
            "exchange": lambda *arguments: None
        },
    }
    for message, changes in wrong.items():
        policy = ss.MixedPrecisionPolicy(grad_wire=AnyWire(**changes))
        with pytest.raises((TypeError, ValueError), match=message):
            backward(model_with(mixed_precision_policy=policy), rank)


def test_what_a_wire_does_wrong_in_backward_is_told() -> None:
    run_on_ranks(fails_in_backward, 2)


def different_wires(rank: int, world_size: int) -> None:
    policy = ss.MixedPrecisionPolicy(grad_wire=MessageWire(("mxfp8", "mxfp4")[rank]))
    with pytest.raises(ValueError, match="messages of mxfp4"):
        model_with(mixed_precision_policy=policy)
    assert dist.get_world_size() == world_size


def test_ranks_with_different_wires_are_told() -> None:
    run_on_ranks(different_wires, 2)
