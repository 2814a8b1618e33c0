"""Meshes of `sidestream train`: what they refuse, and which of them end in the same bits."""

import pytest

from sidestream.tests.ranks import run_on_ranks
from sidestream.training import trainer
from sidestream.training.errors import OptionsError
from sidestream.training.launch.ranks import Place, Replicas
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run

TINY = {"device": "cpu", "model": "tiny", "seq_len": 16, "batch": 8, "steps": 3}


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (Replicas(3), "--dp-outer that divides 8 ranks, got 3; pass another one"),
        (Replicas(2, ranks_per_node=3), "divide the 4 ranks that share a model, got 3"),
        (Replicas(2, ranks_per_node=8), "divide the 4 ranks that share a model, got 8"),
    ],
    ids=["dp_outer", "ranks_per_node", "more than share a model"],
)
def test_what_ranks_cannot_be_is_refused(replicas, expected):
    with pytest.raises(OptionsError, match=expected):
        replicas.check(8)


@pytest.mark.parametrize(
    "replicas",
    [Replicas(), Replicas(8), Replicas(2, "optim", 2), Replicas(ranks_per_node=8)],
    ids=str,
)
def test_what_ranks_can_be_is_taken(replicas):
    replicas.check(8)


def test_it_is_refused_before_any_rank_starts(text_file):
    with pytest.raises(OptionsError, match="--dp-outer that divides 4 ranks, got 3"):
        plan_run(TrainOptions(**TINY, data=text_file, dp_outer=3), 4)


def _train(rank, world_size, runs):
    results = []
    for count, (options, meeting) in enumerate(runs):
        place = Place(rank, world_size, rank, world_size, f"file://{meeting}-{count}")
        results.append(trainer.train(plan_run(options, world_size), place).params_sha256)
    return results


def test_bits_follow_from_the_order_of_sums_alone(text_file, tmp_path):
    in_rank_order = [{}, {"ranks_per_node": 1}, {"ranks_per_node": 4, "zero": 1}, {"dp_outer": 4}]
    in_pairs = [
        {"ranks_per_node": 2},
        {"ranks_per_node": 2, "zero": 0},
        {"dp_outer": 2},
        {"dp_outer": 2, "zero": 1},
        {"dp_outer": 2, "outer_strategy": "optim"},
    ]
    runs = [
        (TrainOptions(**{**TINY, **mesh}, data=text_file), str(tmp_path / "m"))
        for mesh in (*in_rank_order, *in_pairs)
    ]
    sums = run_on_ranks(_train, 4, runs, backend=None)[0]
    flat, paired = set(sums[: len(in_rank_order)]), set(sums[len(in_rank_order) :])
    assert len(flat) == len(paired) == 1, sums
    assert flat != paired
