"""The numbers of training: equal to one plain process, and the same bits however the model is
sharded.
"""

from collections.abc import Iterable

import pytest
import torch

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Job, run, run_all

WORLDS = [1, 2, 3, 4]
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("world_size", WORLDS)
def test_equals_one_plain_process_with_the_whole_batch(world_size: int) -> None:
    steps = 10
    plain = run(0, 1, Job(zero=None, steps=steps, clip=1.0))
    jobs = {f"zero{z}": Job(zero=z, steps=steps, clip=1.0) for z in range(4)}
    outcomes = run_on_ranks(run_all, world_size, jobs)
    for name in jobs:
        # Gradients are sums of a few hundred terms in another order; AdamW's m/sqrt(v) keeps their
        # relative error, and the steps of lr 1e-2 add it up.
        tolerance = steps * 400 * EPS
        for step in range(steps):
            mean = sum(ranks[name].losses[step] for ranks in outcomes) / world_size
            assert mean == pytest.approx(plain.losses[step], rel=tolerance)
        for key, value in plain.params.items():
            torch.testing.assert_close(
                outcomes[0][name].params[key], value, rtol=tolerance, atol=tolerance
            )
        for norms in zip(*(ranks[name].norms for ranks in outcomes), strict=True):
            assert len(set(norms)) == 1
        assert outcomes[0][name].norms == pytest.approx(plain.norms, rel=tolerance)


SPLIT = {"split_root_mib": 0.0001}
VARIANTS = {
    **{f"zero{z}": Job(zero=z) for z in range(4)},
    "no overlap": Job(options={"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "no grad overlap, zero 1": Job(zero=1, options={"overlap_grad_reduce": False}),
    "no gather overlap, zero 2": Job(zero=2, options={"overlap_param_gather": False}),
    "whole model": Job(units="whole"),
    "fine units": Job(units="fine"),
    "fine units, zero 0": Job(zero=0, units="fine"),
    "buckets": Job(zero=0, units="whole", options={"bucket_mib": 0.002}),
    "buckets, zero 3": Job(units="block", options={"bucket_mib": 0.001}),
    "root split": Job(options=SPLIT),
    "root split, zero 0": Job(zero=0, options=SPLIT),
    "root split, buckets, zero 1": Job(zero=1, options={"bucket_mib": 0.0003, **SPLIT}),
    "no prefetch": Job(options={"prefetch": 0}),
    "prefetch 2": Job(options={"prefetch": 2}),
    "keep after forward": Job(options={"reshard_after_forward": False}),
    "reshard root": Job(options={"reshard_after_forward": True}),
    "optimizer after": Job(optimizer_first=False),
    "optimizer after, zero 1": Job(zero=1, optimizer_first=False),
}
BF16_WIRE = {"grad_comm_dtype": torch.bfloat16}
BF16_COMPUTE = {"param_dtype": torch.bfloat16}
POLICIES = {
    "fp32": {},
    "bf16 wire": BF16_WIRE,
    "bf16 compute": BF16_COMPUTE,
    "bf16 compute, fp32 wire": {"param_dtype": torch.bfloat16, "grad_comm_dtype": torch.float32},
}


# What decides what is added up, and in which order; the other variants decide when.
SUMS = ["zero0", "zero1", "zero2", "zero3", "whole model", "fine units", "fine units, zero 0"]
SUMS += ["buckets", "buckets, zero 3", "root split", "root split, zero 0"]
# Three ranks cut unevenly and round sums by their order. Two do neither, whatever the policy.
RUNS = [("fp32", 2, SUMS), ("fp32", 3, VARIANTS), ("bf16 compute", 3, VARIANTS)]
RUNS += [("bf16 wire", 3, SUMS), ("bf16 compute, fp32 wire", 3, SUMS)]


@pytest.mark.parametrize(
    ("policy_name", "world_size", "variants"),
    [pytest.param(*run, id=f"{run[0]}-{run[1]}") for run in RUNS],
)
def test_same_bits_however_sharded(
    policy_name: str, world_size: int, variants: Iterable[str]
) -> None:
    options = {"policy": POLICIES[policy_name], "clip": 0.5, "steps": 3}
    jobs = {name: VARIANTS[name].but(**options) for name in variants}
    jobs |= {
        f"accumulate, zero{z}": Job(zero=z, accumulate=2, policy=POLICIES[policy_name])
        for z in range(4)
    }
    outcomes = run_on_ranks(run_all, world_size, jobs)
    for rank, ranks in enumerate(outcomes):
        hashes = {name: ranks[name].sha256 for name in variants}
        assert len(set(hashes.values())) == 1, hashes
        accumulated = {ranks[f"accumulate, zero{z}"].sha256 for z in range(4)}
        assert len(accumulated) == 1
        assert ranks["zero3"].sha256 == outcomes[0]["zero3"].sha256, f"rank {rank} differs"
    assert outcomes[0]["zero0"].sha256 != outcomes[0]["accumulate, zero0"].sha256


def test_accumulation_equals_the_whole_batch() -> None:
    plain = run(0, 1, Job(zero=None))
    jobs = {f"zero{z}": Job(zero=z, accumulate=3) for z in range(4)}
    outcomes = run_on_ranks(run_all, 2, jobs)
    for name in jobs:
        for key, value in plain.params.items():
            torch.testing.assert_close(outcomes[1][name].params[key], value, rtol=1e-4, atol=1e-4)
