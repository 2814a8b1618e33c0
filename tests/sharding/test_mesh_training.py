"""Training over meshes: plain PyTorch's result but for rounding, one set of bits per mesh."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding import trainer, twins
from sidestream.tests.sharding.trainer import Job, Outcome


@dataclass(frozen=True)
class Mesh:
    """What the ranks make of themselves; `by` has the options of fully_shard."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    by: dict[str, Any]
    flattened: str | None = None  # what all dimensions but the first become

    @property
    def world_size(self) -> int:
        return torch.Size(self.sizes).numel()

    def options(self) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", self.sizes, mesh_dim_names=self.names)
        if self.flattened is not None:
            mesh[self.names[1:]]._flatten(self.flattened)
        return {"device_mesh": mesh, **self.by}


HSDP = {"dp_shard_dim": "shard", "dp_outer_dim": "outer"}
MESHES = {
    "2 x 2": Mesh((2, 2), ("outer", "shard"), HSDP),
    "2 x 2 transposed": Mesh((2, 2), ("shard", "outer"), HSDP),
    "1 x 2": Mesh((1, 2), ("outer", "shard"), HSDP),
    "2 x 1": Mesh((2, 1), ("outer", "shard"), HSDP),
    "2 x 1 x 2 flattened": Mesh((2, 1, 2), ("outer", "dp", "cp"), HSDP, "shard"),
    "4 in nodes of 2": Mesh((4,), ("shard",), {"dp_shard_dim": "shard", "ranks_per_node": 2}),
}


def _jobs(mesh: Mesh, **changes: Any) -> dict[str, Job]:
    """By name: every level, with every outer strategy; units large and small."""
    outer = ["no_shard", "optim"] if "dp_outer_dim" in mesh.by else ["no_shard"]
    return {
        f"zero{zero} {strategy} {units}": Job(
            zero, units=units, options={"outer_dp_sharding_strategy": strategy}, **changes
        )
        for zero in range(4)
        for strategy in outer
        for units in ("block", "whole")
        if (zero or strategy == "no_shard") and (zero in (0, 3) or units == "block")
    }


def _train(
    rank: int, world_size: int, mesh: Mesh, jobs: dict[str, Job]
) -> dict[str, tuple[Outcome, dict[str, int]]]:
    options = mesh.options()
    return {
        name: trainer.run(rank, world_size, job.but(options={**job.options, **options}))
        for name, job in jobs.items()
    }


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_plain_results_and_one_set_of_bits(mesh):
    policy = {"grad_comm_dtype": torch.float32}
    jobs = _jobs(mesh, steps=2, clip=0.5, accumulate=3, policy=policy)
    plain = trainer.run(0, 1, Job(None, steps=2, clip=0.5))
    found = run_on_ranks(_train, mesh.world_size, mesh, jobs, timeout_s=100)
    hashes = {outcome.sha256 for rank in found for outcome in rank.values()}
    norms = {tuple(outcome.norms) for rank in found for outcome in rank.values()}
    assert len(hashes) == len(norms) == 1
    outcome = found[0]["zero3 no_shard block"]
    for name, expected in plain.params.items():
        torch.testing.assert_close(outcome.params[name], expected, rtol=1e-4, atol=2e-5, msg=name)


# ---- the order of sums


def _sum_of_gradients(rank: int, world_size: int, mesh: Mesh) -> torch.Tensor:
    """A gradient that is the rank's input, summed over all ranks."""
    model = nn.Linear(64, 1, bias=False)
    ss.fully_shard(model, gradient_divide_factor=1, zero_dp_strategy=3, **mesh.options())
    model(_inputs(world_size)[rank]).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    return grad.full_tensor()[0]


def _inputs(world_size: int) -> torch.Tensor:
    """Of such different sizes that the order of additions shows."""
    generator = torch.Generator().manual_seed(5)
    exponents = torch.randint(-12, 12, (world_size, 64), generator=generator)
    return torch.randn(world_size, 64, generator=generator) * 2.0**exponents


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("2 x 2", [[0, 1], [2, 3]]),
        ("2 x 2 transposed", [[0, 2], [1, 3]]),
        ("4 in nodes of 2", [[0, 1], [2, 3]]),
    ],
)
def test_sums_go_along_the_shard_axis_first(name, order):
    inputs = _inputs(4)
    first, second = ((inputs[a] + inputs[b]) for a, b in order)
    flat = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    assert not torch.equal(first + second, flat), "the inputs do not tell orders apart"
    for found in run_on_ranks(_sum_of_gradients, 4, MESHES[name]):
        assert torch.equal(found, first + second)


# ---- several meshes in one process


def _two_models(rank: int, world_size: int) -> None:
    """One over all four ranks, one over the two of a row, which each train on inputs of theirs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    row = dist.get_process_group_ranks(mesh.get_group("shard"))

    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    everyone = twins.Twins(
        rank,
        4,
        model(),
        3,
        [nn.Linear],
        device_mesh=mesh,
        dp_shard_dim="shard",
        dp_outer_dim="outer",
        outer_dp_sharding_strategy="optim",
    )
    mine = twins.Twins(row.index(rank), 2, model(), 2, [nn.Linear], device_mesh=mesh["shard"])
    for step in range(3):
        shared = everyone.data(step, 4, 6)
        # Other data in the other row.
        own = mine.data(10 + step + 50 * row[0], 4, 6)
        losses = [
            twins.square_loss(twin.sharded, values[twin.rank])
            for twin, values in ((everyone, shared), (mine, own))
        ]
        # Each backward while the other model's forward waits for its own.
        backwards = zip((mine, everyone), (own, shared), reversed(losses), strict=True)
        for twin, values, loss in backwards:
            for value in values:
                (twins.square_loss(twin.plain, value) / twin.world_size).backward()
            loss.backward()
            twin.check_grads()
        mine.step()
        everyone.step()
    mine.check_params()
    everyone.check_params()


def test_two_models_on_two_meshes():
    run_on_ranks(_two_models, 4)


def _halves(rank: int, world_size: int) -> None:
    """A model a half, of another shape: no rank of one knows of the other."""
    torch.manual_seed(1)
    members = [0, 1] if rank < 2 else [2, 3]
    width = 7 if rank < 2 else 300
    # torch makes the groups of a mesh of part of the ranks on all of them.
    first, second = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3]))
    model = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, width))
    twin = twins.Twins(
        rank - members[0], 2, model, 3, [nn.Linear], device_mesh=first if rank < 2 else second
    )
    twin.train(twins.square_loss, (3, width), steps=2 if rank < 2 else 4)
    assert runtime_of(twin.sharded).collectives.world_size == 2


def test_each_half_of_the_ranks_trains_a_model_of_its_own():
    run_on_ranks(_halves, 4)


def _trained_again(rank: int, world_size: int, folder: str) -> list[str]:
    """The same job before and after all process groups were destroyed; the first model lives on."""
    kept, hashes = [], []
    for attempt in range(2):
        options = MESHES["2 x 2"].options()
        job = Job(steps=2, options={**options, "outer_dp_sharding_strategy": "optim"})
        model, optimizer = trainer.build(job)
        for step in range(2):
            trainer.run_step(model, optimizer, job, step, rank, world_size)
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(trainer.sha256_of(trainer.full_params(model)))
        kept.append(model)
        if attempt == 0:
            dist.destroy_process_group()
            store = dist.FileStore(f"{folder}/store", world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return hashes


def test_a_job_begins_anew_in_the_same_processes(tmp_path):
    found = run_on_ranks(_trained_again, 4, str(tmp_path))
    assert len({sha256 for hashes in found for sha256 in hashes}) == 1
