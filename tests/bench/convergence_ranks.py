"""What the ranks of test_convergence.py do, which is imported by name in processes of their own."""

from dataclasses import replace
from unittest import mock

from sidestream.bench import convergence_worker
from sidestream.bench.convergence_worker import SIZES, Outcome, Run, Settings, train


def trained(rank: int, world_size: int, settings: Settings, run: Run) -> Outcome:
    """As the command's own ranks."""
    assert world_size == settings.ranks
    return train(rank, (settings, run))


def trained_to_ruin(rank: int, world_size: int, settings: Settings, run: Run) -> Outcome:
    """With a learning rate that no weight survives."""
    sizes = {settings.size: replace(SIZES[settings.size], learning_rate=1e30)}
    with mock.patch.object(convergence_worker, "SIZES", sizes):
        return train(rank, (settings, run))
