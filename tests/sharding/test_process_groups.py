"""Groups of a model-parallel job, made over gloo: who is in them, two worlds in one process, what
is refused; a model sharded over the mesh of a collection; the getters of `parallel_state`.
"""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding import parallel_state as state
from sidestream.sharding.data_parallel_groups import data_parallel_groups
from sidestream.sharding.mesh_axes import SHARD_AXIS
from sidestream.sharding.model_parallel_layout import GROUP_KINDS, ModelParallelLayout
from sidestream.sharding.process_groups import (
    OUTER_AXIS,
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
    with pytest.raises((ValueError, AttributeError, KeyError, TypeError, RuntimeError)) as caught:
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
        assert "expected a process group (stages of a pipeline), got none" in _refusal(
            lambda: third.pp
        )
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
    assert mesh.mesh_dim_names == (OUTER_AXIS, SHARD_AXIS) == ("dp_outer", "dp_shard")
    assert mesh.get_group(SHARD_AXIS) is collection.intra_dp_cp
    assert mesh.get_group(OUTER_AXIS) is collection.inter_dist_opt
    of_experts = collection.data_parallel_mesh(expert=True)
    assert of_experts.mesh.tolist() == [[rank % 2], [rank % 2 + 2]]
    groups = data_parallel_groups(mesh, SHARD_AXIS, OUTER_AXIS)
    assert [tuple(axis.ranks) for axis in groups.axes] == [
        _ranks(collection.intra_dp_cp),
        _ranks(collection.inter_dist_opt),
    ]
    model = nn.Linear(4, 4)
    ss.fully_shard(model, device_mesh=mesh, dp_shard_dim=SHARD_AXIS, dp_outer_dim=OUTER_AXIS)
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
    (axis,) = data_parallel_groups(collection.data_parallel_mesh(), SHARD_AXIS).axes
    assert axis.gather is collection.dp_cp
    assert axis.reduce is not None and _ranks(axis.reduce) == tuple(axis.ranks) == (1, 2, 3)
    assert _sum_over(axis.reduce) == 6


def _differing(rank: int) -> None:
    """Arguments that differ between ranks are refused on all, before a group is made."""
    text = _refusal(lambda: initialize_model_parallel(2 if rank == 3 else 1))
    assert "expected the same arguments on every rank, got sizes" in text and "on rank 3" in text
    text = _refusal(lambda: initialize_model_parallel(groups=["dp", "tp"][: 2 - rank // 3]))
    assert "expected the same arguments on every rank, got groups ['tp', 'dp'] on rank 0" in text


def _grid(rank: int) -> None:
    grid = RankGrid((2, 2), ("tp", "dp"))
    experts = grid.view((2, 2), ("ep", "dp"), ("dp",))
    assert "call create_pg for it first" in _refusal(lambda: grid.get_pg("dp"))
    made = grid.create_pg("dp", timeout=datetime.timedelta(seconds=30))
    assert experts.get_pg("dp") is made
    assert _sum_over(made) == 2 * (rank % 2) + 2
    assert "has its group already" in _refusal(lambda: experts.create_pg("dp"))
    assert _ranks(grid.create_pg("dp-tp")) == (0, 1, 2, 3)
    mesh = grid.to_device_mesh()
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_group("dp") is made and _ranks(mesh.get_group("tp")) == _ranks(
        grid.get_pg("tp")
    )
    back = RankGrid.from_device_mesh(mesh)
    assert str(back) == str(grid) and back.get_pg("dp") is made
    mesh = experts.to_device_mesh()
    assert mesh.get_group("dp") is made and mesh.mesh_dim_names == ("dp", "ep")
    experts.destroy()
    assert _sum_over(made) == 2 * (rank % 2) + 2
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


def _options(rank: int) -> None:
    """Time limits, which groups, and what is said of those that are not there."""
    pipeline = initialize_model_parallel(
        1, 4, 2, distributed_timeout_minutes=0.5, groups=iter(["pos_embd", "pp", "embd"])
    )
    limit = pipeline.pp._get_backend(torch.device("cpu")).options._timeout
    assert limit == datetime.timedelta(seconds=30)
    expected = {"pp": (0, 1, 2, 3)} | ({"embd": (0, 3)} if rank in (0, 3) else {})
    expected |= {"pos_embd": (0,)} if rank == 0 else {}
    assert {name: _ranks(group) for name, group in pipeline.groups.items()} == expected
    assert repr(pipeline).startswith("ProcessGroupCollection(pp=[0, 1, 2, 3]")
    if rank == 1:
        assert not hasattr(pipeline, "embd") and pipeline.get("embd") is None
        assert _refusal(lambda: pipeline.embd) == (
            "embd: expected a process group (the first and the last stage, with word embeddings), "
            "got none on this rank; have initialize_model_parallel make it, or pass embd=... to "
            "ProcessGroupCollection"
        )
    text = _refusal(lambda: initialize_model_parallel(3))
    assert "a product that divides the 4 ranks, got tp 3 x cp 1 x pp 1 = 3; change" in text
    unlike = {"expert_tensor_parallel_size": 1, "order": "tp-pp-ep-dp"}
    text = _refusal(lambda: initialize_model_parallel(2, 2, **unlike))
    assert text.startswith("order: expected one in which dense layers and experts have the same")
    text = _refusal(lambda: initialize_model_parallel(local_world_size=5))
    assert "expected some of the job's 4, got 0 to 4; start more ranks" in text
    text = _refusal(lambda: initialize_model_parallel(groups=["tp", "data"]))
    assert "got 'data'; use that name" in text
    text = _refusal(lambda: initialize_model_parallel(distributed_timeout_minutes=0))
    assert "expected None or a positive number of minutes, got 0" in text
    config = {"dp_cp": {"max_ctas": 4}}
    text = _refusal(lambda: initialize_model_parallel(nccl_communicator_config_path=config))
    assert "expected a job over nccl, got gloo and {'max_ctas': 4}; leave the options out" in text
    pipeline.destroy()
    assert _sum_over(ProcessGroupCollection(dp=dist.group.WORLD).dp) == 6
    ProcessGroupCollection(dp=dist.group.WORLD).destroy()
    assert dist.is_initialized()


THREE_GETTERS = {
    "tensor_model": "tp",
    "pipeline_model": "pp",
    "data": "dp",
    "context": "cp",
    "tensor_and_context": "tp_cp",
    "expert_model": "ep",
    "expert_tensor": "expt_tp",
    "expert_tensor_and_model": "tp_ep",
    "expert_data": "expt_dp",
}


def _globals(rank: int) -> None:
    """The getters of Megatron-Core by hand: tp 2, pp 2."""
    for call in (state.get_tensor_model_parallel_group, state.get_data_parallel_rank):
        assert "call parallel_state.initialize_model_parallel first" in _refusal(call)
    assert not state.is_initialized()
    _wrong_arguments()
    made = state.initialize_model_parallel(2, 2, distributed_timeout_minutes=1)
    assert state.get_process_groups() is made and state.model_parallel_is_initialized()
    column, stage = rank % 2, rank // 2
    found = {
        "tp": (
            state.get_tensor_model_parallel_world_size(),
            state.get_tensor_model_parallel_rank(),
        ),
        "source": (state.get_tensor_model_parallel_src_rank(), state.get_model_parallel_src_rank()),
        "pp": (
            state.get_pipeline_model_parallel_world_size(),
            state.get_pipeline_model_parallel_rank(),
        ),
        "ends": (
            state.get_pipeline_model_parallel_first_rank(),
            state.get_pipeline_model_parallel_last_rank(),
        ),
        "beside": (
            state.get_pipeline_model_parallel_prev_rank(),
            state.get_pipeline_model_parallel_next_rank(),
        ),
        "embedding": state.is_rank_in_embedding_group(),
        "stage": (state.is_pipeline_first_stage(), state.is_pipeline_last_stage()),
        "position": state.is_rank_in_position_embedding_group(),
        "dp": (state.get_data_parallel_world_size(), state.get_data_parallel_src_rank()),
    }
    assert found == {
        "tp": (2, column),
        "source": (2 * stage, 0),
        "pp": (2, stage),
        "ends": (column, 2 + column),
        "beside": (2 * (1 - stage) + column,) * 2,
        "embedding": True,
        "stage": (stage == 0, stage == 1),
        "position": stage == 0,
        "dp": (1, rank),
    }
    for name, group in THREE_GETTERS.items():
        expected = getattr(made, group)
        assert getattr(state, f"get_{name}_parallel_group")() is expected, name
        size = getattr(state, f"get_{name}_parallel_world_size")()
        assert size == dist.get_world_size(expected), name
        assert getattr(state, f"get_{name}_parallel_rank")() == dist.get_rank(expected), name
    options: list[dict[str, bool]] = [{}, {"with_context_parallel": True}]
    partial = {"with_context_parallel": True, "partial_data_parallel": True}
    assert [state.get_data_parallel_group(**flags) for flags in (*options, partial)] == [
        made.dp,
        made.dp_cp,
        made.intra_dp_cp,
    ]
    assert [state.get_tensor_and_data_parallel_group(**flags) for flags in options] == [
        made.tp_dp,
        made.tp_dp_cp,
    ]
    assert state.get_expert_data_parallel_group(partial_expert_data_parallel=True) is (
        made.intra_expt_dp
    )
    for call, names in (
        (lambda: state.get_data_parallel_group(partial_data_parallel=True), "['with_context_para"),
        (lambda: state.get_data_parallel_rank(with_context=True), "['with_context_parallel', 'par"),
        (lambda: state.get_tensor_model_parallel_group(with_context_parallel=True), "[] to be Tr"),
        (lambda: state.get_tensor_model_parallel_group(check_initialized=False), "[] to be True"),
    ):
        assert f"options: expected none or all of one of {names}" in _refusal(call)
    assert "parts of the same dense layers" in str(state.get_tensor_model_parallel_rank.__doc__)
    assert "expected a process group" in _refusal(
        state.get_inter_distributed_optimizer_instance_group
    )
    for call in (
        lambda: state.initialize_model_parallel(2),
        lambda: state.set_process_groups(made),
    ):
        with pytest.raises(RuntimeError, match="expected none yet, got ProcessGroupCollection"):
            call()
    tensor = made.tp
    state.destroy_model_parallel()
    assert not state.is_initialized()
    with pytest.raises(KeyError):
        dist.get_process_group_ranks(tensor)
    own = initialize_model_parallel()
    state.set_process_groups(own)
    assert state.get_data_parallel_group() is own.dp
    state.destroy_model_parallel()
    state.destroy_model_parallel()
    with pytest.raises(KeyError):
        dist.get_process_group_ranks(own.dp)


def _wrong_arguments() -> None:
    for wrong in (3, None):
        with pytest.raises(TypeError, match="process_groups: expected a ProcessGroupCollection of"):
            state.set_process_groups(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rank_offset: expected .* of at least 0, got '1'"):
        state.initialize_model_parallel(rank_offset="1")
    with pytest.raises(
        ValueError, match=r"expected some of the job's 4, got 9 to 9; .* offset small"
    ):
        state.initialize_model_parallel(2, rank_offset=9)
    with pytest.raises(ValueError, match=r"local_world_size: expected .* of at least 1, got 0"):
        state.initialize_model_parallel(local_world_size=0)
    assert not state.is_initialized()
    only = initialize_model_parallel(groups=["dp_cp"])
    assert list(only.groups) == ["dp_cp"]
    only.destroy()


def _everything(rank: int, world_size: int) -> None:
    for check in CHECKS:
        check(rank)
        dist.barrier()


CHECKS = (_two_worlds, _instances, _custom_order, _differing, _grid, _options, _globals)


def test_groups_over_gloo() -> None:
    run_on_ranks(_everything, WORLD)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ProcessGroupCollection(data=None), "got 'data'; use that name"),
        (
            lambda: ProcessGroupCollection(tp="tp"),
            "tp: expected a torch.distributed.ProcessGroup or None, got str; pass the group itself",
        ),
        (lambda: ProcessGroupCollection().get("data"), "got 'data'; use that name"),
        (lambda: ProcessGroupCollection().data, "has no attribute 'data'"),
        (
            lambda: setattr(ProcessGroupCollection(), "tp", None),
            "tp: a ProcessGroupCollection never",
        ),
        (lambda: ProcessGroupCollection().tp, "parts of the same dense layers), got none"),
        (initialize_model_parallel, "got no process group; call torch.distributed.init_process"),
    ],
    ids=["unknown", "no group", "get", "attribute", "changed", "unset", "no job"],
)
def test_refused_without_a_job(call: Any, text: str) -> None:
    assert text in _refusal(call)


def test_none_is_unset() -> None:
    collection = ProcessGroupCollection(tp=None)
    assert collection.get("tp") is None and dict(collection.groups) == {}
