"""A gradient passes few files: what is on the stack when it is packed, sent, summed and shown."""

import sys
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
from torch import nn, ones

import sidestream as ss
from sidestream.sharding import wire
from sidestream.sharding.collectives import Channel
from sidestream.sharding.optimizer_view import OptimizerView
from sidestream.tests.ranks import run_on_ranks

SHARDING = Path(ss.sharding.__file__).parent
PATH = {
    "grad_watch": "sees it come",
    "runtime": "whose backward runs",
    "backward_pass": "whose turn it is",
    "exchange": "one reduction under way, stage by stage",
    "wire": "packs and sums",
    "collectives": "sends",
    "optimizer_view": "shows",
}
# They run or note what they are handed, whatever it is.
AROUND = {"lanes", "ranges", "in_flight", "use_watch", "backward_inputs"}


def stack_files(frame: FrameType | None) -> set[str]:
    files = set()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent == SHARDING:
            files.add(path.stem)
        frame = frame.f_back
    return files


def files_passed(rank: int, world_size: int, zero: int) -> set[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
    loss = model(ones(2, 8)).sum()
    passed: set[str] = set()

    def noting(function):
        def call(*arguments, **options):
            passed.update(stack_files(sys._getframe()))
            own = Path(function.__code__.co_filename)
            passed.update({own.stem} if own.parent == SHARDING else ())
            return function(*arguments, **options)

        return call

    with (
        mock.patch.multiple(wire, pack_=noting(wire.pack_), reduce_=noting(wire.reduce_)),
        mock.patch.object(Channel, "exchange", noting(Channel.exchange)),
        mock.patch.object(OptimizerView, "_show", noting(OptimizerView._show)),
    ):
        loss.backward()
    return passed


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_gradient_passes_seven_files(zero: int) -> None:
    for passed in run_on_ranks(files_passed, 2, zero):
        assert passed - AROUND == set(PATH)
