"""Ranks that hold the same part, and parts in another order than the ranks: every element is
gathered, counted and summed once, with the bits of any other sharding.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sidestream.sharding.tensor import group_parts
from sidestream.sharding.tensor.group_parts import Intervals, shares_of
from sidestream.sharding.tensor.torch_state_dict import part_like
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.tensor.cuts import BLOCK, CUTS, sharded, values

WORLD = 4
SHAPES = [(40, 31), (700,), (3, 2), (), (0, 3)]


@pytest.mark.parametrize("numel", [0, 1, 100, 128, 129, 1000, 1024, 4096], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_every_element_is_the_share_of_one_rank_that_holds_it(cut: str, numel: int) -> None:
    intervals = CUTS[cut](numel)
    owners = [0] * numel
    for (low, high), (start, stop) in zip(intervals, shares_of(intervals), strict=True):
        assert low <= start <= stop <= high
        assert start == stop or (start - low) % BLOCK == 0, "a block is divided"
        for element in range(start, stop):
            owners[element] += 1
    assert owners == [1] * numel


@pytest.mark.parametrize("cut", ["whole", "replicas beside", "replicas apart"])
def test_what_several_ranks_hold_is_divided_evenly(cut: str) -> None:
    numels = [stop - start for start, stop in shares_of(CUTS[cut](4096))]
    assert numels == [1024] * WORLD


@pytest.mark.parametrize(
    ("intervals", "same"),
    [
        (((0, 7), (7, 12)), True),
        (((7, 12), (0, 7), (7, 7)), True),
        (((0, 7), (6, 12)), False),
        (((0, 7), (0, 12)), False),
        (((5, 7), (0, 12), (0, 12)), False),
    ],
    ids=["disjoint", "unordered", "overlap", "one start", "inside"],
)
def test_intervals_are_equal_or_apart(intervals: Intervals, same: bool) -> None:
    if same:
        assert shares_of(intervals) == intervals
    else:
        with pytest.raises(ValueError, match="equal or have no element in common"):
            shares_of(intervals)


def gather_all(rank: int, world_size: int) -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.bool)):
        full = values(*shape).to(dtype)
        for cut in CUTS:
            part = sharded(full, cut)
            got = part.full_tensor()
            assert torch.equal(got, full) and got.dtype == dtype, (cut, shape, dtype)
            assert torch.equal(part.to_local(), part.interval_of(full))


def test_full_tensor() -> None:
    run_on_ranks(gather_all, WORLD)


def gathered_numels(rank: int, world_size: int) -> dict[str, int]:
    full, numels = values(64, 64), {}
    for cut in CUTS:
        part = sharded(full, cut)
        with mock.patch.object(
            group_parts, "start_all_gather", side_effect=group_parts.start_all_gather
        ) as gather:
            part.full_tensor()
        numels[cut] = sum(call.args[1].numel() for call in gather.call_args_list) // 4
    return numels


def test_no_more_is_gathered_than_the_tensor_has() -> None:
    for numels in run_on_ranks(gathered_numels, WORLD):
        assert numels == {cut: 0 if cut == "whole" else 4096 for cut in CUTS}


SAME: dict[str, Callable[[Tensor], Any]] = {
    "count_nonzero": lambda t: t.count_nonzero(),
    "max": lambda t: t.max(),
    "amin": lambda t: t.amin(),
    "any": lambda t: (t > 1).any(),
    "all": lambda t: (t < 1).all(),
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "argmax": lambda t: t.argmax(),
    "sum of rows": lambda t: t.sum(-1),
    "standard deviation": lambda t: t.std(),
    "maxima": lambda t: torch.stack(list(torch._foreach_max([t, t.neg()]))),
    "equal": lambda t: torch.tensor([torch.equal(t, t.clone()), torch.equal(t, t + 1)]),
    "infinity norm": lambda t: t.norm(math.inf),
}
NORMS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: t.norm(1),
    "norm 3": lambda t: torch.linalg.vector_norm(t, 3),
    "norms": lambda t: torch.stack(list(torch._foreach_norm([t, t * 2], 2))),
    "total norm": lambda t: nn.utils.get_total_norm([t, t.neg()]),
}


def reduce_all(rank: int, world_size: int) -> list[Any]:
    found = []
    for shape in SHAPES[:3]:
        full = values(*shape)
        parts = {cut: sharded(full, cut) for cut in CUTS}
        for what, reduce in SAME.items():
            for cut, part in parts.items():
                assert torch.equal(reduce(part), reduce(full)), (what, cut, shape)
        for what, norm in NORMS.items():
            by_cut = {cut: norm(part) for cut, part in parts.items()}
            torch.testing.assert_close(by_cut["flat"], norm(full), rtol=1e-5, atol=0)
            for cut, got in by_cut.items():
                assert torch.equal(got, by_cut["flat"]), (what, cut, shape)
            found.append(by_cut["flat"].tolist())
        # Of several cuts at once: each over its own ranks, in one order.
        mixed = torch._foreach_norm(list(parts.values()), 2)
        assert all(torch.equal(norm, mixed[0]) for norm in mixed)
    return found


def test_reductions_count_nothing_twice_and_norms_have_one_value() -> None:
    results = run_on_ranks(reduce_all, WORLD)
    assert all(result == results[0] for result in results)


def compare_with_others(rank: int, world_size: int) -> None:
    full = values(40, 31)
    for mine, other in itertools.permutations(CUTS, 2):
        a, b = sharded(full, mine), sharded(full, other)
        assert torch.equal(a, b) and torch.equal(a, full) and torch.equal(full, a)
        changed = sharded(full, other)
        if rank == 3 or other == "whole":
            changed.local.add_(1.0)
        assert not torch.equal(a, changed)
        for combine in (torch.add, Tensor.copy_, torch.maximum):
            with pytest.raises(RuntimeError, match="expected sharded tensors of one layout"):
                combine(a, b)
        brought = part_like(a, b)
        assert brought.has_layout_of(a) and torch.equal(brought.local, a.local)


def test_tensors_of_two_shardings_are_refused_by_all_ranks_and_brought_over() -> None:
    # With "transposed" and "flat", ranks 0 and 3 hold the same in both.
    run_on_ranks(compare_with_others, WORLD)


def unscale(rank: int, world_size: int, bad_rank: int) -> list[float]:
    flags = []
    for cut in CUTS:
        part = sharded(values(700), cut)
        if rank == bad_rank:
            part.local[:1] = math.inf
        found, scale = torch.zeros(()), torch.full((), 0.5)
        torch._amp_foreach_non_finite_check_and_unscale_([part], found, scale)
        flags.append(found.item())
        rest = part.local[1:]
        assert torch.equal(rest, part.interval_of(values(700) * 0.5)[1:])
    return flags


def test_an_overflow_that_one_rank_sees_is_told_on_all() -> None:
    expected = [0.0 if cut == "whole" else 1.0 for cut in CUTS]
    flags = run_on_ranks(unscale, WORLD, 1)
    assert [flags[rank] for rank in (0, 2, 3)] == [expected] * 3
