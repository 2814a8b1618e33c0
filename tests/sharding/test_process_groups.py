"""Groups of a model-parallel job, made over gloo: who is in them, two worlds in one process, what is
refused; and a model sharded over the mesh of a collection.
"""

import datetime
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding.data_parallel_groups import data_parallel_groups
from sidestream.sharding.model_parallel_layout import GROUP_KINDS, ModelParallelLayout
from sidestream.sharding.process_groups import (
    OUTER_DIM,
    SHARD_DIM,
    ProcessGroupCollection,
    initialize_model_parallel,
)
from sidestream.sharding.rank_grid import RankGrid
from sidestream.tests.ranks import run_on_ranks

WORLD = 4


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _sum_over(group: dist.ProcessGroup) -> int:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    return int(total)


def _refusal(call: Any) -> str:
    with pytest.raises((ValueError, AttributeError, KeyError, TypeError)) as caught:
        call()
    return str(caught.value)


def _check_groups(collection: ProcessGroupCollection, layout: ModelParallelLayout) -> None:
    """All groups have the layout's ranks and work; those of the same ranks are one."""
    rank = dist.get_rank()
    for name in GROUP_KINDS:
        expected = layout.group_of(name, rank)
        group = collection.get(name)
        assert (None if group is None else _ranks(group)) == expected, name
        if group is not None:
            assert group is getattr(collection, name)
            assert _sum_over(group) == sum(expected or ())
    distinct = {_ranks(group) for group in collection.groups.values()}
    assert len(set(collection.groups.values())) == len(distinct)


def _two_worlds(rank: int) -> None:
    """A trainer's and a generator's groups over the same ranks, and a third over some of them."""
    first = initialize_model_parallel(2)
    second = initialize_model_parallel(
        1, 2, expert_model_parallel_size=2, order="pp-tp-ep-cp-dp", distributed_timeout_minutes=2
    )
    _check_groups(first, ModelParallelLayout(world_size=WORLD, tensor_model_parallel_size=2))
    assert _ranks(first.tp) == (rank // 2 * 2, rank // 2 * 2 + 1)
    assert _ranks(second.pp) == _ranks(first.tp)
    assert second.pp is not first.tp
    third = None
    if rank in (1, 2):
        third = initialize_model_parallel(
            2, rank_offset=1, local_world_size=2, groups=["tp", "dp_cp"]
        )
        assert {name: _ranks(group) for name, group in third.groups.items()} == {
            "tp": (1, 2),
            "dp_cp": (rank,),
        }
        assert _sum_over(third.tp) == 3
        assert "expected a process group of the stages" in _refusal(lambda: third.pp)
    else:
        text = _refusal(lambda: initialize_model_parallel(rank_offset=1, local_world_size=2))
        assert text == (
            f"ranks: expected to be called by ranks 1 to 2 alone, got a call on rank {rank}; leave "
            "it out there"
        )
    dist.barrier()
    first.destroy()
    assert _sum_over(second.pp) == 2 * (rank // 2 * 2) + 1
    again = initialize_model_parallel(2)
    assert _sum_over(again.tp) == _sum_over(second.pp)
    for made in (second, third, again):
        if made is not None:
            made.destroy()


def _instances(rank: int) -> None:
    """Two optimizer instances, and the core over them: sharded inside, replicated across."""
    sizes = {"num_distributed_optimizer_instances": 2, "expert_model_parallel_size": 2}
    collection = initialize_model_parallel(**sizes)
    _check_groups(collection, ModelParallelLayout(world_size=WORLD, **sizes))
    mesh = collection.data_parallel_mesh()
    assert mesh.mesh_dim_names == (OUTER_DIM, SHARD_DIM) == ("dp_outer", "dp_shard")
    assert mesh.get_group(SHARD_DIM) is collection.intra_dp_cp
    assert mesh.get_group(OUTER_DIM) is collection.inter_dist_opt
    of_experts = collection.data_parallel_mesh(expert=True)
    assert of_experts.mesh.tolist() == [[rank % 2], [rank % 2 + 2]]
    groups = data_parallel_groups(mesh, SHARD_DIM, OUTER_DIM)
    assert [tuple(axis.ranks) for axis in groups.axes] == [
        _ranks(collection.intra_dp_cp),
        _ranks(collection.inter_dist_opt),
    ]
    model = nn.Linear(4, 4)
    ss.fully_shard(model, device_mesh=mesh, dp_shard_dim=SHARD_DIM, dp_outer_dim=OUTER_DIM)
    model(torch.full((1, 4), float(rank))).sum().backward()
    grad = ss.summary(model)
    assert "dp_outer" in str(grad)
    wrong = ProcessGroupCollection(
        **{**collection.groups, "inter_dist_opt": collection.intra_dp_cp}
    )
    assert "make the groups with initialize_model_parallel" in _refusal(wrong.data_parallel_mesh)
    collection.destroy()


def _custom_order(rank: int) -> None:
    """The core's communicators beside a collection have its ranks, whatever order and offset."""
    if rank == 0:
        return
    collection = initialize_model_parallel(
        context_parallel_size=3, order="dp-cp-tp-pp-ep", rank_offset=1
    )
    assert collection.groups["dp_cp"] is collection.tp_dp_cp
    assert _ranks(collection.dp) == (rank,)
    (axis,) = data_parallel_groups(collection.data_parallel_mesh(), SHARD_DIM).axes
    assert axis.gather is collection.dp_cp
    assert axis.reduce is not None and _ranks(axis.reduce) == tuple(axis.ranks) == (1, 2, 3)
    assert _sum_over(axis.reduce) == 6


def _differing(rank: int) -> None:
    text = _refusal(lambda: initialize_model_parallel(2 if rank == 3 else 1))
    assert "expected the same sizes on every rank" in text and "on rank 3" in text
    text = _refusal(
        lambda: initialize_model_parallel(
            pipeline_model_parallel_size=4,
            get_embedding_ranks=lambda ranks: ranks[:2] if rank else ranks[:1],
        )
    )
    assert "expected the same get_embedding_ranks on every rank" in text


def _grid(rank: int) -> None:
    grid = RankGrid((2, 2), ("tp", "dp"))
    grid.register_view("expert", (2, 2), ("ep", "dp"), ("dp",))
    assert "call create_pg for it first" in _refusal(lambda: grid.get_pg("dp"))
    made = grid.create_pg("dp", timeout=datetime.timedelta(seconds=30))
    assert grid.get_pg("dp", view="expert") is made
    assert _sum_over(made) == 2 * (rank % 2) + 2
    assert "has its group already" in _refusal(lambda: grid.create_pg("dp", view="expert"))
    assert _ranks(grid.create_pg("dp-tp")) == (0, 1, 2, 3)
    mesh = grid.to_device_mesh()
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_group("dp") is made and _ranks(mesh.get_group("tp")) == _ranks(
        grid.get_pg("tp")
    )
    back = RankGrid.from_device_mesh(mesh)
    assert back.factorisation() == grid.factorisation() and back.get_pg("dp") is made
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert RankGrid.from_device_mesh(theirs).get_pg("tp") is theirs.get_group("tp")
    unnamed, strided = DeviceMesh("cpu", [0, 1, 2, 3]), theirs["dp"]
    for mesh in (unnamed, strided):
        assert "ranks that ascend by one" in _refusal(
            lambda mesh=mesh: RankGrid.from_device_mesh(mesh)
        )
    grid.destroy()
    assert "call create_pg" in _refusal(lambda: grid.get_pg("dp"))
    line = RankGrid((2,), ("dp",), 2 * (rank // 2))
    assert line.is_current_rank_in_grid()
    assert line.to_device_mesh().mesh.tolist() == list(line.ranks)
    assert "job's 4" in _refusal(lambda: RankGrid((8,), ("dp",)).create_pg("dp"))


def _everything(rank: int, world_size: int) -> None:
    for check in (_two_worlds, _instances, _custom_order, _differing, _grid):
        check(rank)
        dist.barrier()


def test_groups_over_gloo() -> None:
    run_on_ranks(_everything, WORLD)
