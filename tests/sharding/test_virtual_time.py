"""What schedules hide of a step's communication, in virtual time."""

from unittest import mock

import pytest
import torch

from sidestream.sharding.lanes import _StreamEvent
from sidestream.tests.sharding.on_streams import LANES
from sidestream.tests.sharding.virtual_time import (
    INFINIBAND_GBPS,
    NVLINK_GBPS,
    Cluster,
    Link,
    step_ms,
)

INSIDE = Link(8, NVLINK_GBPS, NVLINK_GBPS)
RAILS = Link(8, INFINIBAND_GBPS, INFINIBAND_GBPS)
# An all-gather across nodes is limited by NVLink, an all-to-all by what leaves a node.
FLAT = Link(64, NVLINK_GBPS, INFINIBAND_GBPS)

CLUSTERS = {
    "node, bound by links": Cluster((INSIDE,), forward_ms=0.5, backward_ms=1.2),
    "node, bound by compute": Cluster((INSIDE,), forward_ms=4.0, backward_ms=8.0),
    "8 nodes, flat": Cluster((FLAT,), forward_ms=2.0, backward_ms=4.0),
    "8 nodes, hierarchical": Cluster((INSIDE, RAILS), forward_ms=2.0, backward_ms=4.0),
}
STEPS = {  # ms of a step: compute alone, lanes in order, pipelined
    "node, bound by links": (54.4, 92.9, 78.7),
    "node, bound by compute": (384.0, 388.0, 388.0),
    "8 nodes, flat": (192.0, 331.4, 315.0),
    "8 nodes, hierarchical": (192.0, 201.4, 201.4),
}


@pytest.mark.parametrize("name", STEPS)
def test_step_takes(name: str) -> None:
    cluster = CLUSTERS[name]
    found = [cluster.compute_ms, *(step_ms(cluster, lanes) for lanes in LANES.values())]
    assert found == pytest.approx(STEPS[name], abs=0.1)


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_one_pair_of_exchange_buffers_costs_no_time(cluster: Cluster) -> None:
    with mock.patch.object(_StreamEvent, "advance", lambda _: None):
        without_waits_for_packs = step_ms(cluster)
    assert step_ms(cluster) == pytest.approx(without_waits_for_packs)


def test_partial_sums_travel_beside_compute() -> None:
    cluster = CLUSTERS["8 nodes, hierarchical"]
    narrow = step_ms(cluster, grad_partial_dtype=torch.bfloat16)
    assert step_ms(cluster) - narrow < 0.01 * narrow
