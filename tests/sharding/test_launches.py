"""What lanes launch in two steps of four units: a collective is one launch, a kernel another."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import sidestream as ss
from sidestream.bench.virtual_streams import LoopbackGroup, Machine
from sidestream.tests.sharding.on_streams import run
from sidestream.tests.sharding.trainer import Job

# An allocation is none, nor are the tests' own fills of new memory.
NO_LAUNCHES = ("aten::empty", "aten::fill_")


class Counting(Machine):
    """Counts what each stream is given; what a collective brings is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[tuple[int, str]] = Counter()

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name not in NO_LAUNCHES:
            self._count(func._schema.name)
        return super().launch(func, args, kwargs)

    def transfer(self, group: LoopbackGroup, kind: str, target: Tensor, part: Tensor) -> None:
        self._count(kind)

    def _count(self, name: str) -> None:
        self.launches[self.streams.index(self.current), name] += 1


PACK, SUM, ZERO, CAST = "sidestream::pack_", "sidestream::reduce_", "aten::zero_", "aten::copy_"
EXCHANGES = {PACK: 8, "exchange": 8, SUM: 8}
# A step is an evaluation, a forward and a backward. Sharded parameters are gathered for each, but
# the root's stay from forward to backward; replicated ones after the first optimizer step.
SHARDED, REPLICATED = 2 * (4 + 4 + 3), 4
CASES = {
    "zero3": (Job(zero=3), {"gather": SHARDED}, EXCHANGES),
    "zero3, bf16": (
        Job(zero=3, policy={"param_dtype": torch.bfloat16}),
        {"gather": SHARDED, CAST: SHARDED},
        EXCHANGES,
    ),
    "zero2": (Job(zero=2), {"gather": REPLICATED}, EXCHANGES),
    "zero1, no_sync": (
        Job(zero=1, accumulate=2),
        {"gather": REPLICATED},
        {PACK: 3 * 8, ZERO: 8, "exchange": 8, SUM: 8},
    ),
    "zero0": (Job(zero=0), {}, {**EXCHANGES, "gather": 8}),
}


@pytest.mark.parametrize(("job", "gathers", "reductions"), CASES.values(), ids=CASES)
def test_a_unit_takes_so_many_launches(
    job: Job, gathers: dict[str, int], reductions: dict[str, int]
) -> None:
    machine = Counting()
    run(machine, job)
    found: dict[int, dict[str, int]] = {0: {}, 1: {}, 2: {}}
    for (stream, name), count in machine.launches.items():
        found[stream][name] = count
    assert (found[1], found[2]) == (gathers, reductions)


@pytest.mark.parametrize("zero", [0, 1])
def test_after_a_step_of_our_adamw_no_gather_casts(zero: int) -> None:
    machine = Counting()
    job = Job(zero=zero, policy={"param_dtype": torch.bfloat16})
    run(machine, job, optimizer=lambda model: ss.AdamW(model.parameters(), lr=0.5))
    assert machine.launches[1, CAST] == 4, "those of the first forward alone"
    assert machine.launches[1, "gather"] == (2 * 4 if zero else 0)
    machine = Counting()
    run(machine, job)
    assert machine.launches[1, CAST] == 2 * 4
