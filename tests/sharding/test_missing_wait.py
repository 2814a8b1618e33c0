"""No wait can be taken away unnoticed: data arrives only when it is waited for, and until then
memory is NaN.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from sidestream.sharding.collectives import Channel
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Job, run

CASES = {"gather": 3, "exchange": 2, "gather_reduced": 0}


class LatePending:
    """An operation whose data arrives in `wait`, or never if `skip`."""

    def __init__(self, operation: Callable[[], Any], skip: bool) -> None:
        self._operation, self._skip = operation, skip

    def wait(self) -> None:
        if not self._skip:
            for pending in self._operation():
                pending.wait()


def late(kind: str, skipped: str | None) -> Any:
    original = getattr(Channel, kind)

    def method(self: Channel, *args: Any) -> Any:
        return [LatePending(lambda: original(self, *args), kind == skipped)]

    return mock.patch.object(Channel, kind, method)


def train_late(rank: int, world_size: int, zero: int, skipped: str | None) -> str:
    with late("gather", skipped), late("exchange", skipped), late("gather_reduced", skipped):
        return run(rank, world_size, Job(zero=zero)).sha256


def compare(rank: int, world_size: int, zero: int, skipped: str) -> None:
    expected = run(rank, world_size, Job(zero=zero)).sha256
    assert train_late(rank, world_size, zero, None) == expected, "a wait is missing"
    assert train_late(rank, world_size, zero, skipped) != expected, (
        "this test cannot see a missing wait"
    )


@pytest.mark.parametrize(("skipped", "zero"), CASES.items(), ids=CASES)
def test_results_rest_on_waits_alone(skipped: str, zero: int) -> None:
    run_on_ranks(compare, 2, zero, skipped)
