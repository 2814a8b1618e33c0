"""`DistributedDataParallelConfig`: all that is wrong is said at once, and nothing changes it."""

import dataclasses

import pytest
import torch

import sidestream as ss
from sidestream.sharding.data_parallel_config import DistributedDataParallelConfig
from sidestream.sharding.shard_config import ReverseBuckets

WRONG = {
    "sizes": ({"bucket_size": 9, "num_buckets": 2}, ["at most one of bucket_size, num_buckets"]),
    "size of no element": ({"bucket_size": 0}, ["bucket_size: expected None or a whole number"]),
    "size of half an element": ({"bucket_size": 0.5}, ["bucket_size: expected None or a whole"]),
    "no MiB": ({"bucket_mib": -1}, ["bucket_mib: expected None or a positive number of MiB"]),
    "no bucket": ({"num_buckets": True}, ["num_buckets: expected None or a whole number"]),
    "gather of whole parameters": (
        {"overlap_param_gather": True},
        ["overlap_param_gather needs use_distributed_optimizer=True"],
    ),
    "nothing to align": (
        {"align_param_gather": True, "use_distributed_optimizer": True},
        ["align_param_gather needs overlap_param_gather=True"],
    ),
    "instances of whole optimizers": (
        {"num_distributed_optimizer_instances": 2},
        ["num_distributed_optimizer_instances needs use_distributed_optimizer=True"],
    ),
    "no instance": (
        {"num_distributed_optimizer_instances": 0},
        ["num_distributed_optimizer_instances: expected a whole number of at least 1, got 0"],
    ),
    "means of sums": (
        {"average_in_collective": True, "calculate_per_token_loss": True},
        ["average_in_collective and calculate_per_token_loss exclude each other"],
    ),
    "patterns for nothing": (
        {
            "grad_reduce_in_fp32": True,
            "param_name_patterns_for_fp32_local_accumulation": ("router.*",),
        },
        ["grad_reduce_in_fp32 and param_name_patterns_for_fp32_local_accumulation exclude"],
    ),
    "a text for a tuple": (
        {"param_name_patterns_for_fp32_local_accumulation": "all"},
        ["expected a tuple of texts, got 'all'"],
    ),
    "two wires": (
        {"grad_reduce_in_fp32": True, "grad_wire": "mxfp8"},
        ["grad_reduce_in_fp32 and grad_wire exclude each other"],
    ),
    "unknown wires": (
        {"grad_wire": "fp7", "param_wire": "mxfp4"},
        ["grad_wire: expected one of", "got 'fp7'", "param_wire: expected one of", "got 'mxfp4'"],
    ),
    "a flag that is a text": (
        {"overlap_grad_reduce": "yes"},
        ["overlap_grad_reduce: expected True or False, got 'yes'"],
    ),
    "all at once": (
        {
            "bucket_size": -1,
            "bucket_mib": 25,
            "align_param_gather": True,
            "num_distributed_optimizer_instances": 4,
            "check_for_nan_in_grad": 1,
        },
        [
            "bucket_size: expected",
            "at most one of bucket_size, bucket_mib",
            "align_param_gather needs",
            "optimizer_instances needs",
            "check_for_nan_in_grad: expected True or False, got 1",
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_all_that_is_wrong_is_said_at_once(case):
    options, texts = case
    with pytest.raises(ValueError, match="DistributedDataParallelConfig") as caught:
        DistributedDataParallelConfig(**options)
    for text in texts:
        assert text in str(caught.value)


def test_nothing_changes_it():
    config = DistributedDataParallelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_size = 5
    config.unit_sizes(4096)
    assert config == DistributedDataParallelConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Derived(DistributedDataParallelConfig):
    """With an option of its own."""

    mine: int = 3


def test_classes_may_derive_from_it():
    assert Derived(mine=4, bucket_size=2).mine == 4
    with pytest.raises(ValueError, match="align_param_gather needs"):
        Derived(align_param_gather=True)


SIZES = {
    "nothing overlaps": ({}, ReverseBuckets(None)),
    "default": ({"overlap_grad_reduce": True}, ReverseBuckets(40_000_000)),
    "many ranks": ({"overlap_grad_reduce": True}, ReverseBuckets(64_000_000)),
    "elements": ({"bucket_size": 7}, ReverseBuckets(7)),
    "MiB": ({"bucket_mib": 0.5}, ReverseBuckets(2**19, counts_bytes=True)),
    "number": ({"num_buckets": 3}, ReverseBuckets(None, count=3)),
}


@pytest.mark.parametrize("name", SIZES)
def test_bucket_sizes(name):
    options, expected = SIZES[name]
    world_size = 64 if name == "many ranks" else 8
    sizes = DistributedDataParallelConfig(**options).unit_sizes(world_size)
    assert sizes.reverse_buckets == expected
    assert sizes.whole_numel == 1


def test_bytes_are_those_of_what_backward_makes():
    rule = ReverseBuckets(2**20, counts_bytes=True)
    assert rule.least_numel(4, 2**30) == 2**18
    assert rule.least_numel(2, 2**30) == 2**19
    assert ReverseBuckets(9).least_numel(2, 100) == 9
    assert ReverseBuckets(None, count=3).least_numel(2, 100) == 34


def test_policy():
    policy = DistributedDataParallelConfig(grad_reduce_in_fp32=True).policy()
    assert policy == ss.MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
    assert DistributedDataParallelConfig().policy() == ss.MixedPrecisionPolicy()
    quantised = DistributedDataParallelConfig(grad_wire="mxfp8", param_wire="fp8").policy()
    assert (quantised.grad_wire.name, quantised.param_wire) == ("mxfp8", "fp8")
    padded = DistributedDataParallelConfig(pad_buckets_for_high_nccl_busbw=True)
    assert padded.unit_sizes(1).whole_numel == 2**16
