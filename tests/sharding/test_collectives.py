"""Which collectives are called where: gloo sends what lies on a CPU, and stages what does not."""

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sidestream.sharding.collectives import Channel, Traffic
from sidestream.sharding.process_groups import Axis, data_parallel_groups
from sidestream.tests.ranks import run_on_ranks


def _channel(rank, world_size, device_type):
    group, traffic = dist.group.WORLD, Traffic()
    axis = Axis("dp_shard", world_size, rank, group, group)
    return Channel(axis, torch.device(device_type), traffic), traffic


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


def _device_over_gloo(rank, world_size, device_type):
    mesh = None
    if device_type is not None:
        mesh = DeviceMesh.from_group(dist.group.WORLD, device_type)
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        return str(data_parallel_groups(mesh, None).device)


def test_gloo_is_for_cpus_unless_a_mesh_says_otherwise():
    for device_type, expected in ((None, "cpu"), ("cpu", "cpu"), ("cuda", "cuda:0")):
        assert run_on_ranks(_device_over_gloo, 2, device_type) == [expected] * 2


def _communicators(rank, world_size):
    groups, again = data_parallel_groups(None, None), data_parallel_groups(None, None)
    (axis,) = groups.axes
    assert axis.gather is dist.group.WORLD is groups.group and axis.reduce is not axis.gather
    assert again.axes[0].reduce is axis.reduce
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (axis.gather, axis.reduce)
    ]


def test_models_share_a_second_communicator_with_the_users_time_limit():
    assert run_on_ranks(_communicators, 2, timeout_s=50) == [[40.0, 40.0]] * 2
