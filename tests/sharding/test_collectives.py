"""Which collectives are called where: gloo sends what lies on a CPU, and stages what does not."""

import torch
import torch.distributed as dist

from sidestream.sharding.collectives import Channel, Traffic
from sidestream.sharding.uses import Uses
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.axes import one_axis


def _channel(rank, world_size, device_type):
    device, traffic = torch.device(device_type), Traffic()
    (axis,) = one_axis(rank, world_size, device, dist.group.WORLD).axes
    return Channel(axis, device, traffic, Uses()), traffic


def _gather(rank, world_size, device_type):
    """The tensors are a CPU's: gloo's all-gather takes those too."""
    channel, _ = _channel(rank, world_size, device_type)
    flat = torch.zeros(2 * world_size)
    slices = list(flat.split(2))
    pending = channel.gather(flat, slices, torch.full((2,), rank + 1.0), "a gather")
    for operation in pending:
        operation.wait()
    return flat.tolist(), len(pending)


def test_a_cpu_has_a_send_and_a_receive_per_peer():
    assert run_on_ranks(_gather, 3, "cpu") == [([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], 4)] * 3


def test_a_gpu_has_gloo_gather_by_way_of_the_host():
    assert run_on_ranks(_gather, 3, "cuda") == [([1.0, 1.0, 2.0, 2.0, 3.0, 3.0], 1)] * 3


def _exchange(rank, world_size, device_type):
    """Rank r sends [r, p] to rank p. What nobody sends stays NaN."""
    channel, traffic = _channel(rank, world_size, device_type)
    parts = [[float(rank), float(peer)] for peer in range(world_size)]
    sent = torch.tensor(parts, dtype=torch.bfloat16).flatten()
    received = torch.full((2 * channel.received_parts,), float("nan"), dtype=torch.bfloat16)
    pending = channel.exchange(received, sent, "an exchange")
    for operation in pending:
        operation.wait()
    assert sent.view(-1, 2).tolist() == parts
    assert traffic.sent_bytes["exchange"] == 4 * (world_size - 1)
    return received.view(-1, 2).tolist(), len(pending)


def test_a_cpu_exchanges_with_its_peers_alone():
    for rank, found in enumerate(run_on_ranks(_exchange, 3, "cpu")):
        assert found == ([[float(peer), float(rank)] for peer in range(3) if peer != rank], 4)


def test_a_gpu_has_one_all_to_all():
    for rank, found in enumerate(run_on_ranks(_exchange, 3, "cuda")):
        assert found == ([[float(peer), float(rank)] for peer in range(3)], 1)
