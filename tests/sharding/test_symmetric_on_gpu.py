"""Sums that read other ranks' memory, over NCCL: the bits of messages, on each of the ZeRO levels.

One rank, over a group of its own, allocates, maps, meets and reads as several do, and overlaps as
they do; it cannot show that what another GPU has packed is seen. Two ranks need two GPUs.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sidestream as ss
from sidestream.sharding.data_parallel_groups import ONE_RANK_VARIABLE
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.shared_files import sharing
from sidestream.training.result import sha256_of

WIDTH, STEPS = 192, 4
POLICIES = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "mxfp8": {"grad_wire": "mxfp8"},
}
CASES = [
    (zero, wire, overlap)
    for zero, wire, overlap in (
        (0, "fp32", True),
        (2, "bf16", "pipelined"),
        (3, "mxfp8", True),
        (3, "bf16", False),
    )
]
# What torch.empty hands out is filled on the current stream, which need not be its owner's.
UNPOISONED = {"SIDESTREAM_TEST_POISON": "0", ONE_RANK_VARIABLE: "1"}


def _train(device, rank, symmetric_memory, zero, wire, overlap):
    """The weights' hash, and what sums went by. Nothing here adds in an order of its own."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ss.fully_shard(
        model,
        optimizer,
        zero_dp_strategy=zero,
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=ss.MixedPrecisionPolicy(**POLICIES[wire]),
        overlap_grad_reduce=overlap,
        symmetric_memory=symmetric_memory,
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(64, WIDTH, generator=generator).to(device)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: param.full_tensor().cpu() for name, param in model.named_parameters()}
    assert all(weight.isfinite().all() for weight in weights.values())
    (route,) = ss.summary(model).exchanges.values()
    return sha256_of(weights), route


def _compare(rank, world_size, device_type):
    """Whether rank's memory was read, and why not."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    for case in CASES:
        expected, _ = _train(device, rank, "off", *case)
        with sharing() if device_type == "cpu" else nullcontext():
            found, route = _train(device, rank, "auto", *case)
        if not route.startswith("symmetric memory"):
            return route
        assert found == expected, case
    dist.barrier()
    return ""


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("device", "world"),
    [
        ("cpu", 1),
        ("cpu", 2),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=pytest.mark.gpu),
    ],
)
def test_the_bits_of_messages(device, world, record_property):
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need as many GPUs")
    backend = "nccl" if device == "cuda" else "gloo"
    whys = set(run_on_ranks(_compare, world, device, backend=backend, env=UNPOISONED))
    if world > 1 and whys != {""}:
        pytest.skip(f"these GPUs cannot: {whys}")
    assert whys == {""}
    shown = "its own memory alone was read" if world == 1 else "each other's memory was read"
    record_property("detail", f"{world} rank{'s' * (world > 1)}: {shown}, same bits")
