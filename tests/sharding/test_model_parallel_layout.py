"""Which ranks are in which group: small jobs written out by hand, large ones against a slow
definition, and what is refused.
"""

import hashlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sidestream.sharding.model_parallel_layout import GROUP_KINDS, ModelParallelLayout
from sidestream.sharding.process_groups import ProcessGroupCollection
from sidestream.sharding.rank_grid import RankGrid

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "instances": "num_distributed_optimizer_instances",
    "order": "order",
    "offset": "rank_offset",
}


def layout(world_size: int, **options: Any) -> ModelParallelLayout:
    return ModelParallelLayout(
        world_size=world_size, **{SHORT[name]: value for name, value in options.items()}
    )


def _digits(text: str) -> list[tuple[int, ...]]:
    """'01 23' as groups of one-digit ranks; hexadecimal."""
    return [tuple(int(digit, 16) for digit in group) for group in text.split()]


# By hand, from the rules: the leftmost varies fastest; embd has the ends of each pipeline, pos_embd
# its start; instances are stretches.
GOLDEN: dict[str, tuple[ModelParallelLayout, dict[str, str]]] = {
    "tp 2, pp 2, dp 2": (
        layout(8, tp=2, pp=2),
        {
            "tp": "01 23 45 67",
            "pp": "04 15 26 37",
            "dp": "02 13 46 57",
            "dp_cp": "02 13 46 57",
            "mp": "0145 2367",
            "embd": "04 15 26 37",
            "pos_embd": "0 1 2 3",
            "tp_dp_cp": "0123 4567",
            "cp": "0 1 2 3 4 5 6 7",
            "intra_dp_cp": "02 13 46 57",
            "inter_dist_opt": "",
            "intra_dist_opt": "01234567",
        },
    ),
    "dp before pp turned round": (
        layout(8, tp=2, pp=2, order="tp-pp-dp"),
        {"tp": "01 23 45 67", "pp": "02 13 46 57", "dp": "04 15 26 37", "mp": "0123 4567"},
    ),
    "dp the fastest": (
        layout(8, tp=2, pp=2, order="dp-tp-pp"),
        {"dp": "01 23 45 67", "tp": "02 13 46 57", "pp": "04 15 26 37", "tp_dp": "0123 4567"},
    ),
    "pp the fastest": (
        layout(8, tp=2, pp=2, order="pp-tp-dp"),
        {"pp": "01 23 45 67", "tp": "02 13 46 57", "dp": "04 15 26 37", "embd": "01 23 45 67"},
    ),
    "middle stages have no embeddings": (
        layout(8, pp=4),
        {"pp": "0246 1357", "embd": "06 17", "pos_embd": "0 1", "dp": "01 23 45 67"},
    ),
    "cp and dp together": (
        layout(8, tp=2, cp=2),
        {
            "cp": "02 13 46 57",
            "dp": "04 15 26 37",
            "dp_cp": "0246 1357",
            "tp_cp": "0123 4567",
            "tp_dp": "0145 2367",
            "tp_dp_cp": "01234567",
        },
    ),
    "cp after dp": (
        layout(8, tp=2, cp=2, order="tp-dp-cp"),
        {"dp": "02 13 46 57", "cp": "04 15 26 37", "dp_cp": "0246 1357"},
    ),
    "experts over dp": (
        layout(8, ep=4),
        {
            "dp": "01234567",
            "ep": "0123 4567",
            "expt_dp": "04 15 26 37",
            "expt_tp": "0 1 2 3 4 5 6 7",
            "tp_ep": "0123 4567",
            "tp_ep_pp": "0123 4567",
        },
    ),
    "experts not split as dense layers are": (
        layout(8, tp=2, ep=2, etp=1),
        {
            "tp": "01 23 45 67",
            "dp": "0246 1357",
            "expt_tp": "0 1 2 3 4 5 6 7",
            "ep": "01 23 45 67",
            "expt_dp": "0246 1357",
        },
    ),
    "experts split more than dense layers": (
        layout(8, ep=2, etp=2, pp=2),
        {
            "dp": "0123 4567",
            "expt_tp": "01 23 45 67",
            "ep": "02 13 46 57",
            "tp_ep": "0123 4567",
            "tp_ep_pp": "01234567",
            "expt_dp": "0 1 2 3 4 5 6 7",
            "pp": "04 15 26 37",
        },
    ),
    "experts with cp": (
        layout(8, cp=2, ep=2, tp=2),
        {"dp_cp": "0246 1357", "ep": "02 13 46 57", "expt_dp": "04 15 26 37"},
    ),
    "two instances": (
        layout(8, instances=2, ep=2),
        {
            "dp_cp": "01234567",
            "intra_dp_cp": "0123 4567",
            "inter_dist_opt": "04 15 26 37",
            "expt_dp": "0246 1357",
            "intra_expt_dp": "02 46 13 57",
            "intra_dist_opt": "0123 4567",
        },
    ),
    "four instances in a pipeline": (
        layout(16, instances=4, pp=2, tp=2),
        {
            "dp_cp": "0246 1357 8ace 9bdf",
            "intra_dp_cp": "0 2 4 6 1 3 5 7 8 a c e 9 b d f",
            "inter_dist_opt": "0246 1357 8ace 9bdf",
            "intra_dist_opt": "0189 23ab 45cd 67ef",
        },
    ),
    "instances cut across cp": (
        layout(8, cp=4, instances=2),
        {"dp_cp": "01234567", "intra_dp_cp": "0123 4567", "inter_dist_opt": "04 15 26 37"},
    ),
    "later ranks of the job": (
        layout(4, tp=2, offset=4),
        {"tp": "45 67", "dp": "46 57", "intra_dist_opt": "4567"},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_small_jobs(name: str) -> None:
    job, expected = GOLDEN[name]
    assert {kind: job.groups(kind) for kind in expected} == {
        kind: _digits(text) for kind, text in expected.items()
    }


# ---- large jobs, by a definition that looks at one rank after the other

LARGE = {
    "defaults": layout(4096),
    "tp 8 x pp 16": layout(4096, tp=8, pp=16),
    "tp 8 x pp 16, pp first": layout(512, tp=8, pp=16, order="pp-tp-dp"),
    "cp 4": layout(512, tp=8, cp=4, pp=8),
    "cp last": layout(256, tp=4, cp=8, pp=2, order="tp-dp-cp-pp"),
    "ep 64": layout(1024, ep=64, tp=2, pp=4),
    "ep 64, etp 1": layout(1024, ep=64, tp=8, etp=1, pp=4),
    "all at once": layout(4096, ep=16, tp=4, etp=2, pp=8, cp=2),
    "another order": layout(192, ep=2, tp=2, pp=3, cp=2, order="cp-tp-ep-dp-pp"),
    "odd sizes": layout(1155, tp=3, pp=7, cp=5, ep=11, etp=1),
    "8 instances": layout(1024, tp=8, pp=2, instances=8, ep=8),
    "offset": layout(1000, tp=2, pp=5, cp=2, instances=5, offset=96),
}


def _coordinates(job: ModelParallelLayout, experts: bool) -> dict[int, dict[str, int]]:
    """Of every rank, by counting up like an odometer whose first wheel is the fastest."""
    tp, pp = job.tensor_model_parallel_size, job.pipeline_model_parallel_size
    if experts:
        sizes = {"tp": job.expert_tensor_parallel_size or tp, "ep": job.expert_model_parallel_size}
    else:
        sizes = {"tp": tp, "cp": job.context_parallel_size}
    sizes |= {"pp": pp}
    sizes["dp"] = job.world_size // math.prod(sizes.values())
    names = [name for name in job.order.split("-") if name in sizes]
    names += [name for name in sizes if name not in names]
    slow_first = itertools.product(*(range(sizes[name]) for name in reversed(names)))
    return {
        job.rank_offset + number: dict(zip(reversed(names), place, strict=True))
        for number, place in enumerate(slow_first)
    }


def _alike(places: Mapping[int, Mapping[str, int]], free: Sequence[str]) -> list[tuple[int, ...]]:
    """Ranks that have the same coordinates but for `free`."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, place in places.items():
        fixed = tuple(item for item in sorted(place.items()) if item[0] not in free)
        found.setdefault(fixed, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _instance_of(job: ModelParallelLayout) -> dict[int, int]:
    """The optimizer instance of each rank: where it is in its data-parallel group."""
    found = {}
    for group in _alike(_coordinates(job, experts=False), ("dp", "cp")):
        for place, rank in enumerate(group):
            found[rank] = place * job.num_distributed_optimizer_instances // len(group)
    return found


def _slowly(job: ModelParallelLayout) -> dict[str, list[tuple[int, ...]]]:
    dense, experts = _coordinates(job, experts=False), _coordinates(job, experts=True)
    of_dense = {"tp": "tp", "pp": "pp", "mp": "tp pp", "cp": "cp", "tp_cp": "tp cp", "dp": "dp"}
    of_dense |= {"dp_cp": "dp cp", "tp_dp": "tp dp", "tp_dp_cp": "tp dp cp"}
    of_experts = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp ep", "tp_ep_pp": "tp ep pp"}
    of_experts |= {"expt_dp": "dp"}
    found = {name: _alike(dense, dims.split()) for name, dims in of_dense.items()}
    found |= {name: _alike(experts, dims.split()) for name, dims in of_experts.items()}
    found["embd"] = [tuple(sorted({group[0], group[-1]})) for group in found["pp"]]
    found["pos_embd"] = [group[:1] for group in found["pp"]]
    instance = _instance_of(job)
    for name in ("dp_cp", "expt_dp"):
        found[f"intra_{name}"] = [
            tuple(rank for rank in group if instance[rank] == number)
            for group in found[name]
            for number in range(job.num_distributed_optimizer_instances)
        ]
    found["intra_dist_opt"] = [
        tuple(rank for rank in dense if instance[rank] == number)
        for number in range(job.num_distributed_optimizer_instances)
    ]
    places = {rank: index for group in found["intra_dp_cp"] for index, rank in enumerate(group)}
    found["inter_dist_opt"] = []
    for group in found["dp_cp"] if job.num_distributed_optimizer_instances > 1 else []:
        for index in range(len(group) // job.num_distributed_optimizer_instances):
            found["inter_dist_opt"].append(tuple(r for r in group if places[r] == index))
    return found


def _digest(groups: Mapping[str, list[tuple[int, ...]]]) -> str:
    return hashlib.sha256(repr(sorted(groups.items())).encode()).hexdigest()


@pytest.mark.parametrize("name", LARGE)
def test_large_jobs(name: str) -> None:
    job = LARGE[name]
    groups = {kind: job.groups(kind) for kind in GROUP_KINDS}
    everyone = set(range(job.rank_offset, job.rank_offset + job.world_size))
    for kind, found in groups.items():
        members = [rank for group in found for rank in group]
        assert len(members) == len(set(members)), f"{kind} overlaps"
        if kind not in ("embd", "pos_embd", "inter_dist_opt"):
            assert set(members) == everyone, kind
        assert all(list(group) == sorted(group) for group in found), kind
        for rank in (min(everyone), max(everyone), min(everyone) + job.world_size // 3):
            own = [group for group in found if rank in group]
            assert job.group_of(kind, rank) == (own[0] if own else None), kind
    slow = _slowly(job)
    for kind in GROUP_KINDS:
        assert (groups[kind][:1], groups[kind][-1:]) == (slow[kind][:1], slow[kind][-1:]), kind
    assert _digest(groups) == _digest(slow)


def test_ends_of_a_large_job_by_hand() -> None:
    job = LARGE["tp 8 x pp 16"]
    assert job.groups("tp")[0] == tuple(range(8)) and job.groups("tp")[-1][-1] == 4095
    assert job.groups("pp")[0] == tuple(range(0, 4096, 256))
    assert job.groups("dp")[0] == tuple(range(0, 256, 8))
    assert job.groups("dp")[-1] == tuple(range(3847, 4096, 8))


def test_time_of_4096_ranks() -> None:
    """All twenty kinds take 15 ms of a core; 30 times as much is allowed here."""
    start = time.process_time()
    job = layout(4096, tp=8, pp=8, ep=16, etp=2, cp=2, instances=2)
    for kind in GROUP_KINDS:
        assert job.groups(kind)
    assert time.process_time() - start < 0.45


def test_kinds_are_the_fields_of_a_collection() -> None:
    assert set(GROUP_KINDS) == set(ProcessGroupCollection.__annotations__)


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "product": (
        8,
        {"tp": 3, "cp": 2},
        "sizes of dense layers: expected a product that divides the 8 ranks, got tp 3 x cp 2 x pp "
        "1 = 6; change the sizes or start another number of ranks",
    ),
    "product of experts": (
        8,
        {"tp": 2, "ep": 8},
        "sizes of experts: expected a product that divides the 8 ranks, got tp 2 x ep 8 x pp 1 = "
        "16; change the sizes or start another number of ranks",
    ),
    "no size": (
        8,
        {"tp": 0},
        "tensor_model_parallel_size: expected a whole number of at least 1, got 0",
    ),
    "half a size": (8, {"pp": 1.5}, "pipeline_model_parallel_size: expected a whole number"),
    "a truth": (
        8,
        {"cp": True},
        "context_parallel_size: expected a whole number of at least 1, got True",
    ),
    "no experts": (
        8,
        {"etp": 0},
        "expert_tensor_parallel_size: expected a whole number of at least 1, got 0",
    ),
    "negative offset": (
        8,
        {"offset": -1},
        "rank_offset: expected a whole number of at least 0, got -1",
    ),
    "order lacks a dimension": (
        8,
        {"tp": 2, "order": "cp-dp-pp"},
        "order: expected tp, cp, ep, dp, pp joined by '-', each once, got 'cp-dp-pp', which lacks "
        "tp of size 2; name every dimension whose size is not 1, the fastest first",
    ),
    "order lacks dp": (8, {"order": "tp"}, "which lacks dp of size 8"),
    "order with a stranger": (8, {"order": "tp-dp-xp"}, "each once, got 'tp-dp-xp'; name every"),
    "order twice": (8, {"order": "tp-dp-tp"}, "each once, got 'tp-dp-tp'"),
    "no order": (8, {"order": None}, "each once, got None"),
    "other pipelines of experts": (
        8,
        {"tp": 2, "etp": 1, "pp": 2, "order": "tp-pp-ep-dp"},
        "order: expected one in which dense layers and experts have the same pipelines, got "
        "'tp-pp-ep-dp', with (0, 2) for dense layers, for experts (0, 1); let dp come after tp, cp "
        "and ep, and pp last",
    ),
    "instances": (
        8,
        {"instances": 3},
        "num_distributed_optimizer_instances: expected a divisor of the 8 data-parallel ranks (dp "
        "x cp) and the 8 of experts, got 3; pass one",
    ),
    "instances of experts": (8, {"ep": 4, "instances": 4}, "and the 2 of experts, got 4"),
    "other instances of experts": (
        8,
        {"ep": 2, "instances": 2, "order": "tp-cp-dp-ep-pp"},
        "order: expected one in which dense layers and experts have the same replicas in optimizer "
        "instances, got 'tp-cp-dp-ep-pp', with (0, 4) for dense layers, for experts (0, 2); let dp "
        "come after tp, cp and ep, and pp last",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    world_size, options, text = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        layout(world_size, **options)
    assert text in str(caught.value)


def test_a_virtual_pipeline_needs_a_pipeline() -> None:
    with pytest.raises(ValueError, match="expected None without a pipeline, got 2"):
        ModelParallelLayout(world_size=4, virtual_pipeline_model_parallel_size=2)


def test_a_rank_of_another_job_is_in_no_group() -> None:
    assert layout(4).group_of("dp", 3) == (0, 1, 2, 3)
    assert layout(4).group_of("dp", 4) is None


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*'dp_cp'.*got 'data'; use that name"):
        layout(4).groups("data")


# ---- grids of any dimensions


def test_grid_of_three_dimensions() -> None:
    grid = RankGrid((2, 3, 2), ("a", "b", "c"), 10)
    assert grid.get_rank_enum("b") == [(10, 12, 14), (11, 13, 15), (16, 18, 20), (17, 19, 21)]
    assert grid.get_rank_enum("c-a") == grid.get_rank_enum(["a", "c"])
    assert grid.get_rank_enum("a-c") == [(10, 11, 16, 17), (12, 13, 18, 19), (14, 15, 20, 21)]
    assert str(grid) == "a 2 x b 3 x c 2 = 12"


def test_view_of_a_grid() -> None:
    grid = RankGrid((2, 2, 2), ("tp", "dp", "pp"))
    view = grid.view((4, 2), ("ep", "pp"), ("pp",))
    assert view.get_rank_enum("pp") == grid.get_rank_enum("pp")
    assert view.get_rank_enum("ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]


GRIDS: dict[str, tuple[Any, str]] = {
    "no dimensions": (lambda: RankGrid((), ()), "a word of its own for each size of ()"),
    "too few names": (
        lambda: RankGrid((2, 2), ("a",)),
        "a word of its own for each size of (2, 2)",
    ),
    "same names": (lambda: RankGrid((2, 2), ("a", "a")), "got ('a', 'a')"),
    "joined name": (lambda: RankGrid((2,), ("a-b",)), "'-' is what joins names"),
    "size": (
        lambda: RankGrid((2, 0), ("a", "b")),
        "size of 'b': expected a whole number of at least 1, got 0",
    ),
    "offset": (lambda: RankGrid((2,), ("a",), 1.0), "rank_offset: expected a whole number"),
    "unknown": (lambda: RankGrid((2,), ("a",)).get_rank_enum("b"), "expected some of ('a',)"),
    "twice": (lambda: RankGrid((2,), ("a",)).get_rank_enum("a-a"), "each once, got 'a-a'"),
    "none": (lambda: RankGrid((2,), ("a",)).get_rank_enum([]), "each once, got []"),
    "view's product": (
        lambda: RankGrid((2, 2), ("a", "b")).view((3,), ("c",)),
        "shape: expected sizes with the product of a 2 x b 2 = 4, got c 3 = 3; change those sizes",
    ),
    "view shares what it lacks": (
        lambda: RankGrid((2, 2), ("a", "b")).view((4,), ("c",), ("b",)),
        "expected some of ('c',)",
    ),
    "view shares what differs": (
        lambda: RankGrid((2, 4), ("a", "b")).view((4, 2), ("b", "c"), ("b",)),
        "shared_dims: expected the groups of a 2 x b 4 = 8 along 'b', (0, 2, 4, 6) and so on, got "
        "(0, 1, 2, 3) and so on from b 4 x c 2 = 8",
    ),
    "names": (lambda: RankGrid((2, 2), (1, 2)), "a word of its own for each size of (2, 2)"),
    "no job": (lambda: RankGrid((2,), ("a",)).create_pg("a"), "got no process group; call"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_refuses(name: str) -> None:
    call, text = GRIDS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert text in str(caught.value)
