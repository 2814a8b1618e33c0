"""Names of dimensions become axes; what is wrong with a mesh is told before anything changes."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.mesh_axes import MeshAxes, all_ranks, ranks_per_node_of, resolve_axes
from sidestream.tests.ranks import run_on_ranks

# ---- which rank stands where


def _along(mesh: torch.Tensor, dim: int, rank: int) -> list[int]:
    """The ranks of a mesh [ranks] that differ from `rank` along `dim` alone, as torch groups them:
    in ascending order.
    """
    (place,) = (mesh == rank).nonzero().tolist()
    place[dim] = slice(None)
    return sorted(mesh[tuple(place)].tolist())


def _axes(mesh: torch.Tensor, dims: dict[str, int], rank: int) -> MeshAxes:
    ranks = [_along(mesh, dim, rank) for dim in dims.values()]
    return resolve_axes(tuple(dims), ranks, mesh.flatten().tolist(), rank)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str
)
def test_every_rank_finds_the_same_places_in_any_order_of_dimensions(order):
    """outer 2, shard 3, tensor-parallel 2: each tensor-parallel rank has axes of its own."""
    mesh = torch.arange(12).view(2, 3, 2).permute(order)
    dims = {"shard": order.index(1), "outer": order.index(0)}
    for rank in range(12):
        axes = _axes(mesh, dims, rank)
        own = rank % 2
        expected = {
            6 * outer + 2 * shard + own: (shard, outer) for outer in range(2) for shard in range(3)
        }
        assert axes.coordinates == expected and list(axes.coordinates) == sorted(expected)
        assert axes.sizes == (3, 2)
        assert axes.along(0, rank) == tuple(6 * (rank // 6) + 2 * one + own for one in range(3))
        assert axes.along(1, rank) == (rank % 6, rank % 6 + 6)


def test_a_split_keeps_neighbours_together():
    axes = _axes(torch.arange(16).view(2, 4, 2), {"shard": 1, "outer": 0}, 5).split_by_node(2)
    assert axes.names == ("shard/node", "shard/rail", "outer")
    assert axes.sizes == (2, 2, 2)
    assert axes.along(0, 5) == (5, 7) and axes.along(1, 5) == (1, 5) and axes.along(2, 5) == (5, 13)
    assert axes.coordinates[13] == (0, 1, 1)


def test_refuses_ranks_in_another_order_along_one_line_than_the_next():
    swapped = torch.tensor([[0, 3], [2, 1]])
    with pytest.raises(ValueError, match="device_mesh: expected ranks that ascend along every"):
        _axes(swapped, {"shard": 1, "outer": 0}, 0)


# ---- ranks of a node

FOUR = all_ranks(4)


@pytest.mark.parametrize(
    ("axes", "nodes", "expected"),
    [
        pytest.param(FOUR, "aabb", 2, id="two nodes"),
        pytest.param(FOUR, "aaaa", 4, id="one node"),
        pytest.param(FOUR, "abcd", 1, id="a rank a node"),
        pytest.param(FOUR, "abab", 1, id="nodes in turn"),
        pytest.param(FOUR, "aaab", 1, id="unequal nodes"),
        pytest.param(FOUR, "abba", 1, id="a node in two places"),
        pytest.param(FOUR, ["a", "a", None, None], 1, id="some not said"),
        pytest.param(FOUR, [None] * 4, 1, id="nothing said"),
        pytest.param(
            _axes(torch.arange(8).view(4, 2), {"shard": 0}, 1),
            "aaaabbbb",
            2,
            id="half of each node's ranks, by tensor parallelism",
        ),
        pytest.param(
            _axes(torch.arange(8).view(2, 4), {"shard": 1, "outer": 0}, 0),
            "aabbccdd",
            2,
            id="beside an outer axis",
        ),
        pytest.param(
            _axes(torch.arange(8).view(2, 4), {"shard": 1, "outer": 0}, 0),
            "aabbcccc",
            1,
            id="replicas that lie otherwise",
        ),
        pytest.param(
            _axes(torch.arange(8).view(2, 4), {"shard": 1, "outer": 0}, 0),
            "aaaabbbb",
            4,
            id="a replica a node",
        ),
    ],
)
def test_nodes_that_the_launcher_names_split_the_axis(axes, nodes, expected):
    told = dict(enumerate(nodes))
    assert ranks_per_node_of(axes, dict.fromkeys(axes.coordinates), told) == expected


def _as_torchrun_says(rank: int, world_size: int, nodes: list[str], count: str) -> list[str]:
    said = {"GROUP_RANK": nodes[rank], "LOCAL_WORLD_SIZE": count}
    model = nn.Linear(4, 4)
    with mock.patch.dict("os.environ", said):
        ss.fully_shard(model)
    return [axis.name for axis in runtime_of(model).collectives.groups.axes]


def test_the_environment_splits_over_several_nodes_alone():
    split = run_on_ranks(_as_torchrun_says, 4, ["0", "0", "1", "1"], "2")
    assert split == [["dp_shard/node", "dp_shard/rail"]] * 4
    assert run_on_ranks(_as_torchrun_says, 4, ["0"] * 4, "4") == [["dp_shard"]] * 4


# ---- refusals


@contextlib.contextmanager
def _refused(match: str, kind: type[Exception] = ValueError) -> Iterator[nn.Module]:
    """A model that must come out as it was."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    with pytest.raises(kind, match=match):
        yield model
    for name, param in model.named_parameters():
        identity, value = before[name]
        assert id(param) == identity and torch.equal(param, value)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        pytest.param(
            {"dp_outer_dim": "outer"},
            ValueError,
            "dp_outer_dim: expected a device_mesh that has dimension 'outer', got none; pass the",
            id="outer dimension without a mesh",
        ),
        pytest.param(
            {"dp_outer_dim": 1},
            TypeError,
            "dp_outer_dim: expected the name of one of the mesh's dimensions, got 1; name",
            id="outer dimension by number",
        ),
        pytest.param(
            {"outer_dp_sharding_strategy": "optim"},
            ValueError,
            "outer_dp_sharding_strategy: expected 'no_shard' without dp_outer_dim, got 'optim'",
            id="outer strategy without a dimension",
        ),
        pytest.param(
            {"outer_dp_sharding_strategy": "hybrid"},
            ValueError,
            r"outer_dp_sharding_strategy: expected one of \['no_shard', 'optim'\], got 'hybrid'",
            id="unknown outer strategy",
        ),
        pytest.param(
            {"ranks_per_node": 2},
            ValueError,
            "ranks_per_node: expected a process group whose ranks are split, got none and 2; start",
            id="ranks_per_node without a group",
        ),
        *(
            pytest.param(
                {"ranks_per_node": value},
                kind,
                "ranks_per_node: expected None or a whole number of at least 1, got "
                f"{re.escape(repr(value))}; pass such a value",
                id=f"ranks_per_node {value!r}",
            )
            for value, kind in (
                (0, ValueError),
                (-2, ValueError),
                (2.5, ValueError),
                (True, TypeError),
                ("2", TypeError),
            )
        ),
    ],
)
def test_options_of_fully_shard(options, kind, message):
    with _refused(f"^{message}", kind) as model:
        ss.fully_shard(model, **options)


def _of_one_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    mesh["outer", "cp"]._flatten("outer_cp")
    names = re.escape("['outer', 'dp', 'cp', 'dp_cp', 'outer_cp']")
    wrong: dict[str, dict[str, Any]] = {
        rf"dp_shard_dim: expected one of the mesh's dimension names {names}, got 'shard'; name": {
            "dp_shard_dim": "shard"
        },
        rf"dp_outer_dim: expected one of the mesh's dimension names {names}, got 'x'; name": {
            "dp_shard_dim": "cp",
            "dp_outer_dim": "x",
        },
        "dp_outer_dim: expected another dimension than dp_shard_dim, got 'cp' for both; name": {
            "dp_shard_dim": "cp",
            "dp_outer_dim": "cp",
        },
        r"dp_shard_dim: expected the name .* device_mesh has 3 dimensions .*; got None": {
            "dp_outer_dim": "outer"
        },
        r"dp_outer_dim: expected a dimension without ranks of 'dp_cp' beside one's own, got "
        r"'outer_cp', which has \[\d\] too; pass dimensions that do not overlap": {
            "dp_shard_dim": "dp_cp",
            "dp_outer_dim": "outer_cp",
        },
        "ranks_per_node: expected a number that divides the 2 ranks to shard over, got 4; pass": {
            "dp_shard_dim": "cp",
            "ranks_per_node": 4,
        },
    }
    for message, options in wrong.items():
        with _refused(f"^{message}") as model:
            ss.fully_shard(model, device_mesh=mesh, **options)
    with _refused("^dp_shard_dim: expected the name .* device_mesh has 1 dimensions") as model:
        ss.fully_shard(model, device_mesh=mesh["cp"], dp_outer_dim="cp")
    ss.fully_shard(model, device_mesh=mesh, dp_shard_dim="cp", ranks_per_node=np.int64(2))
    assert ss.summary(model).world_size == 2


def test_refuses_dimensions_that_a_mesh_lacks():
    run_on_ranks(_of_one_mesh, 4)


def _in_other_order(rank: int, world_size: int) -> None:
    """Ranks that are not where torch's groups, which ascend, have them."""
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("outer", "shard"))
    with _refused("^device_mesh: expected ranks that ascend along every") as model:
        ss.fully_shard(model, device_mesh=mesh, dp_shard_dim="shard", dp_outer_dim="outer")


def test_refuses_a_mesh_in_another_order():
    run_on_ranks(_in_other_order, 4)


def _differently(rank: int, world_size: int) -> list[str]:
    """What rank 3 is told; the others are told the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    names = {"dp_shard_dim": "a", "dp_outer_dim": "b"}
    swapped = {"dp_shard_dim": "b", "dp_outer_dim": "a"}
    odd = rank == 3
    told = []
    for usual, other in (
        ({"device_mesh": mesh, **names}, {"device_mesh": mesh, **swapped}),
        ({"device_mesh": mesh, **names}, {}),
        ({"ranks_per_node": 2}, {"ranks_per_node": 4}),
        ({"ranks_per_node": 2}, {}),
        (
            {"device_mesh": mesh, **names, "outer_dp_sharding_strategy": "optim"},
            {"device_mesh": mesh, **names},
        ),
    ):
        with _refused("on rank 0") as model:
            try:
                ss.fully_shard(model, zero_dp_strategy=1, **(other if odd else usual))
            except ValueError as error:
                told.append(str(error))
                raise
    return told


def test_ranks_with_different_meshes_are_told():
    found = run_on_ranks(_differently, 4, timeout_s=40)
    assert found.count(found[0]) == 4
    swapped, missing, other, absent, strategy = found[0]
    assert swapped == (
        "device_mesh: expected the same dimensions on every rank, got a 2 x b 2 of ranks "
        "[0, 1, 2, 3] on rank 0 and b 2 x a 2 of ranks [0, 1, 2, 3] on rank 3; make one mesh, "
        "or process_groups, on all ranks and name the same dimensions"
    )
    assert "got a 2 x b 2 of ranks [0, 1, 2, 3] on rank 0 and dp_shard 4 of ranks" in missing
    assert other.startswith(
        "ranks_per_node: expected the same on every rank, got 2 on rank 0 and 4"
    )
    assert "got 2 on rank 0 and None on rank 3; pass one value" in absent
    assert "rank 3: outer_dp_sharding_strategy is" in strategy
