"""Communicators of a mesh's axes: members alone make them, once; nothing stale, none split."""

import gc
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding import data_parallel_groups as data_parallel_groups_module
from sidestream.sharding.communicators import communicator, gather_objects
from sidestream.sharding.data_parallel_groups import (
    ONE_RANK_VARIABLE,
    DataParallelGroups,
    data_parallel_groups,
)
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.sharding import trainer

Mesh = tuple[tuple[int, ...], tuple[str, ...]]


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def _told(groups: DataParallelGroups) -> dict[str, Any]:
    """What of `groups` can travel, ranks by their numbers in the job; all communicators work."""
    for axis in groups.axes:
        for group in (axis.gather, axis.reduce):
            if group is not None:
                assert (dist.get_rank(group), dist.get_world_size(group)) == (axis.rank, axis.size)
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert total == axis.size
        assert axis.gather is None or axis.gather is not axis.reduce
        assert _ranks(axis.gather) == _ranks(axis.reduce)
    assert groups.coordinates[groups.rank] == tuple(axis.rank for axis in groups.axes)
    return {
        "axes": [(axis.name, axis.size, _ranks(axis.gather)) for axis in groups.axes],
        "group": _ranks(groups.group),
        "coordinates": groups.coordinates,
    }


# ---- which ranks are along which axis


def _axes(
    rank: int, world_size: int, mesh: Mesh, outer: str | None, ranks_per_node: int | None
) -> dict[str, Any]:
    made = data_parallel_groups(_mesh(*mesh), "shard", outer, ranks_per_node=ranks_per_node)
    return _told(made)


@pytest.mark.parametrize(
    ("names", "shard", "outer", "coordinates"),
    [
        (("outer", "shard"), [[0, 1], [2, 3]], [[0, 2], [1, 3]], ((0, 0), (1, 0), (0, 1), (1, 1))),
        (("shard", "outer"), [[0, 2], [1, 3]], [[0, 1], [2, 3]], ((0, 0), (0, 1), (1, 0), (1, 1))),
    ],
    ids=["outer dimension first", "shard dimension first"],
)
def test_names_decide_and_not_positions(names, shard, outer, coordinates):
    for rank, found in enumerate(run_on_ranks(_axes, 4, ((2, 2), names), "outer", None)):
        (along_shard,) = [ranks for ranks in shard if rank in ranks]
        (along_outer,) = [ranks for ranks in outer if rank in ranks]
        assert found["axes"] == [("shard", 2, along_shard), ("outer", 2, along_outer)]
        assert found["group"] == [0, 1, 2, 3]
        assert found["coordinates"] == coordinates


def test_an_axis_of_one_rank_has_no_communicators():
    for found in run_on_ranks(_axes, 2, ((1, 2), ("outer", "shard")), "outer", None):
        assert found["axes"] == [("shard", 2, [0, 1]), ("outer", 1, None)]
    for found in run_on_ranks(_axes, 2, ((1, 2), ("shard", "outer")), "outer", None):
        assert found["axes"] == [("shard", 1, None), ("outer", 2, [0, 1])]
        assert found["coordinates"] == ((0, 0), (0, 1))


def test_a_split_axis_has_ranks_of_a_node_and_rails():
    for rank, found in enumerate(run_on_ranks(_axes, 4, ((4,), ("shard",)), None, 2)):
        node, rail = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        assert found["axes"] == [("shard/node", 2, node), ("shard/rail", 2, rail)]
        assert found["group"] == [0, 1, 2, 3]
        assert found["coordinates"] == ((0, 0), (1, 0), (0, 1), (1, 1))


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_one_rank_or_all_of_them_split_nothing(ranks_per_node):
    for found in run_on_ranks(_axes, 4, ((4,), ("shard",)), None, ranks_per_node):
        assert found["axes"] == [("shard", 4, [0, 1, 2, 3])]


def test_a_split_axis_beside_an_outer_one_makes_three():
    mesh = (2, 4), ("outer", "shard")
    for rank, found in enumerate(run_on_ranks(_axes, 8, mesh, "outer", 2)):
        first = rank // 4 * 4
        node = [rank // 2 * 2, rank // 2 * 2 + 1]
        rail = [first + rank % 2, first + rank % 2 + 2]
        assert found["axes"] == [
            ("shard/node", 2, node),
            ("shard/rail", 2, rail),
            ("outer", 2, [rank % 4, rank % 4 + 4]),
        ]
        assert found["coordinates"] == tuple((one % 2, one // 2 % 2, one // 4) for one in range(8))


def _of_a_stage(rank: int, world_size: int) -> dict[str, Any]:
    """The stages' ranks are no group of the mesh nor the job's."""
    mesh = _mesh((2, 2, 2), ("outer", "stage", "shard"))["outer", "shard"]
    return _told(data_parallel_groups(mesh, "shard", "outer"))


def test_a_sub_mesh_of_two_dimensions_has_a_group_of_its_own():
    for rank, found in enumerate(run_on_ranks(_of_a_stage, 8)):
        stage = [0, 1, 4, 5] if rank in (0, 1, 4, 5) else [2, 3, 6, 7]
        assert found["group"] == stage
        assert found["coordinates"] == ((0, 0), (1, 0), (0, 1), (1, 1))


def _flattened(rank: int, world_size: int, sizes: tuple[int, ...], by: str) -> dict[str, Any]:
    names = ("outer", "dp_shard", "cp")
    mesh = _mesh(sizes, names)
    flat = mesh["dp_shard", "cp"]._flatten("shard")
    if by == "itself":
        return _told(data_parallel_groups(flat, "shard"))
    return _told(data_parallel_groups(mesh, "shard", "outer"))


def test_a_flattened_dimension_is_found_by_its_name():
    for found in run_on_ranks(_flattened, 4, (1, 2, 2), "its root"):
        assert found["axes"] == [("shard", 4, [0, 1, 2, 3]), ("outer", 1, None)]
    for rank, found in enumerate(run_on_ranks(_flattened, 4, (2, 1, 2), "its root")):
        both = [[0, 1], [2, 3]][rank // 2]
        assert found["axes"] == [("shard", 2, both), ("outer", 2, [rank % 2, rank % 2 + 2])]
    for found in run_on_ranks(_flattened, 4, (1, 2, 2), "itself"):
        assert found["axes"] == [("shard", 4, [0, 1, 2, 3])]


# ---- made once for each set of ranks, by its members


def _shared(rank: int, world_size: int) -> list[float]:
    first, second = data_parallel_groups(None, None), data_parallel_groups(None, None)
    (axis,), (again,) = first.axes, second.axes
    assert axis.gather is dist.group.WORLD is first.group
    assert again.reduce is axis.reduce
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (axis.gather, axis.reduce)
        if group is not None
    ]


def test_models_share_communicators_with_the_users_time_limit():
    assert run_on_ranks(_shared, 2, timeout_s=50) == [[40.0, 40.0]] * 2


def _of_a_part_first(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks 0 and 1 have a communicator that 2 and 3 lack when all four shard a model."""
    mesh = _mesh((2, 2), ("outer", "shard"))
    part = data_parallel_groups(mesh["shard"], None) if rank < 2 else None
    crossed = data_parallel_groups(mesh, "outer", "shard")
    both = data_parallel_groups(mesh, "shard", "outer")
    assert part is None or both.axes[0].reduce is part.axes[0].reduce
    assert crossed.axes[0].reduce is both.axes[1].reduce
    assert [_ranks(axis.reduce) for axis in both.axes] == [
        _ranks(axis.reduce) for axis in reversed(crossed.axes)
    ]
    return _told(both)


def test_ranks_may_have_made_others_before():
    for found in run_on_ranks(_of_a_part_first, 4):
        assert found["coordinates"] == ((0, 0), (1, 0), (0, 1), (1, 1))


def _again(rank: int, world_size: int, folder: str) -> None:
    before = data_parallel_groups(None, None, ranks_per_node=2)
    old = [group for axis in before.axes for group in (axis.gather, axis.reduce)]
    dist.destroy_process_group()
    # `before` lives on, as that of a model from before would.
    for attempt in range(2):
        store = dist.FileStore(f"{folder}/store{attempt}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        made = data_parallel_groups(None, None, ranks_per_node=2)
        _told(made)
        assert not any(axis.gather in old or axis.reduce in old for axis in made.axes)
        if attempt == 0:
            del made
            dist.destroy_process_group()
            gc.collect()


def test_groups_of_an_earlier_job_are_not_found_again(tmp_path):
    run_on_ranks(_again, 4, str(tmp_path))


def _after_one_was_destroyed(rank: int, world_size: int) -> None:
    first = data_parallel_groups(None, None)
    assert first.axes[0].reduce is not None
    dist.destroy_process_group(first.axes[0].reduce)
    second = data_parallel_groups(None, None)
    assert second.axes[0].reduce is not first.axes[0].reduce
    _told(second)


def test_a_destroyed_communicator_is_made_anew():
    run_on_ranks(_after_one_was_destroyed, 2)


# ---- what a GPU needs of them


def _beside_a_bound_group(rank: int, world_size: int) -> tuple[list[int] | None, str]:
    """Ranks 0 and 1 make one; what torch would split off the job's group would wait for rank 2."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda:0")
    split_from = []

    def watched(group: Any) -> None:
        split_from.append(group)

    try:
        with mock.patch.object(c10d, "_get_split_source", watched):
            made = communicator("reduce", (0, 1), world) if rank < 2 else None
            assert not split_from
            # The fake is what torch looks at: without care it would split.
            if rank < 2:
                dist.new_group([rank], backend="gloo", use_local_synchronization=True)
                assert split_from == [world]
        assert world.bound_device_id == torch.device("cuda:0")
        return _ranks(made), str(made.bound_device_id) if made else ""
    finally:
        world.bound_device_id = None


def test_none_is_split_off_a_bound_group():
    found = run_on_ranks(_beside_a_bound_group, 3, timeout_s=30)
    assert found == [([0, 1], "cuda:0"), ([0, 1], "cuda:0"), (None, "")]


def _used_in_fully_shard(rank: int, world_size: int) -> None:
    """How many collectives each communicator has had before the first forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear])
    (axis,) = runtime_of(model).collectives.groups.axes
    for group in (axis.gather, axis.reduce):
        assert group is not None
        assert group._get_sequence_number_for_group() > 0


def test_both_communicators_are_used_before_the_first_step():
    run_on_ranks(_used_in_fully_shard, 2)


GPU = mock.patch.multiple(
    torch.cuda, is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 8
)


def _device(
    rank: int, world_size: int, mesh_type: str | None, bound: str | None, devices: list[str]
) -> str:
    world = dist.group.WORLD
    assert world is not None
    mesh = None if mesh_type is None else DeviceMesh.from_group(world, mesh_type)
    with ExitStack() as stack:
        stack.enter_context(GPU)
        # The tensors of these groups stay on the CPU.
        stack.enter_context(
            mock.patch.object(data_parallel_groups_module, "_use_once", lambda *_: None)
        )
        stack.enter_context(
            mock.patch(
                "sidestream.sharding.data_parallel_groups.gather_objects", lambda *_: [_[0]] * 2
            )
        )
        world.bound_device_id = None if bound is None else torch.device(bound)
        stack.callback(setattr, world, "bound_device_id", None)
        held = [torch.device(device) for device in devices]
        device = str(data_parallel_groups(mesh, None, devices=held).device)
    # A rank that left would close connections that the other has yet to make.
    dist.barrier()
    return device


@pytest.mark.parametrize(
    ("mesh_type", "bound", "devices", "expected"),
    [
        pytest.param(None, None, ["cpu"], "cpu", id="gloo is for CPUs"),
        pytest.param("cpu", None, ["cpu"], "cpu", id="a mesh of CPUs"),
        pytest.param("cuda", None, ["cpu"], "cuda:0", id="the current one"),
        pytest.param("cuda", None, ["cuda:2"], "cuda:2", id="the parameters'"),
        pytest.param("cuda", None, ["cpu", "cuda:2"], "cuda:2", id="some parameters'"),
        pytest.param("cuda", "cuda:3", ["cpu"], "cuda:3", id="the bound one"),
        pytest.param("cuda", "cuda:3", ["cuda:3", "meta"], "cuda:3", id="bound and parameters'"),
    ],
)
def test_the_device_is_the_groups_else_the_parameters(mesh_type, bound, devices, expected):
    assert run_on_ranks(_device, 2, mesh_type, bound, devices) == [expected] * 2


def test_objects_travel_by_way_of_the_groups_device():
    """torch takes the current one, which a program that binds its group may never have set."""
    entered = []

    class Entered:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    group: Any = object()
    with (
        mock.patch.object(torch.cuda, "device", Entered),
        mock.patch.object(dist, "get_world_size", lambda _: 2),
        mock.patch.object(dist, "all_gather_object", lambda *_, **__: entered.append("objects")),
    ):
        gather_objects("value", group, torch.device("cuda:3"), "a meeting")
        gather_objects("value", group, torch.device("cpu"), "a meeting")
    assert entered == [torch.device("cuda:3"), "objects", None, "objects"]


@pytest.mark.parametrize(
    ("bound", "devices", "message"),
    [
        pytest.param(
            "cuda:3",
            ["cuda:0"],
            "module: expected parameters on cuda:3, to which the process group is bound, got them "
            "on cuda:0; move the model there",
            id="another than the group's",
        ),
        pytest.param(
            None,
            ["cuda:1", "cuda:0"],
            "module: expected parameters on one GPU, got some on each of cuda:0, cuda:1; move",
            id="several",
        ),
    ],
)
def test_refuses_parameters_elsewhere(bound, devices, message):
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_device, 2, "cuda", bound, devices)
    assert all(message in text for text in failed.value.failures.values())
    assert len(failed.value.failures) == 2


def _one_rank(rank: int, world_size: int, switch: dict[str, str]) -> trainer.Outcome:
    job = trainer.Job(
        zero=3, policy={"param_dtype": torch.bfloat16, "grad_comm_dtype": torch.bfloat16}
    )
    with mock.patch.dict("os.environ", switch):
        return trainer.run(rank, world_size, job)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("gloo", {"gather"}), ("cpu:gloo,cuda:gloo", {"gather", "exchange"})],
    ids=["peers, of which there are none", "native"],
)
def test_one_rank_communicates_with_itself_where_told_to(backend, expected):
    """As `make gpu-check` does with NCCL, whose gathers and exchanges are native."""
    (alone,) = run_on_ranks(_one_rank, 1, {}, backend=backend)
    (over_group,) = run_on_ranks(_one_rank, 1, {ONE_RANK_VARIABLE: "1"}, backend=backend)
    assert over_group.sha256 == alone.sha256 and over_group.losses == alone.losses
    assert not {"gather", "exchange"} & alone.calls.keys()
    assert expected <= over_group.calls.keys()


def test_a_group_that_we_make_is_bound_to_its_gpu():
    """So that NCCL connects the ranks then, and not when they first communicate."""
    made = []
    with (
        GPU,
        mock.patch.dict("os.environ", RANK="3", WORLD_SIZE="8", LOCAL_RANK="3"),
        mock.patch.object(torch.cuda, "set_device", lambda index: made.append(index)),
        mock.patch.object(dist, "init_process_group", lambda *args, **kw: made.append((args, kw))),
        mock.patch.object(dist, "get_rank", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        data_parallel_groups(None, None)
    assert made == [3, (("nccl",), {"device_id": torch.device("cuda:3")})]
