"""`sidestream train --use-torch-fsdp2`: the losses of ours, checkpoints that either resumes."""

from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from sidestream.tests.ranks import RanksFailed, preload, run_on_ranks
from sidestream.training import batches, engines, trainer
from sidestream.training.launch.ranks import Place
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run

preload("torch.distributed.fsdp", "sidestream.training.trainer")

TINY = {"device": "cpu", "model": "tiny", "seq_len": 16, "batch": 8, "steps": 4, "accumulate": 2}
FSDP2 = {"use_torch_fsdp2": True}


def _train(rank, world_size, runs, meeting):
    results = []
    for number, options in enumerate(runs):
        place = Place(rank, world_size, rank, world_size, f"file://{meeting}-{number}")
        results.append(trainer.train(plan_run(options, world_size), place))
    return results


def _close(value):
    return pytest.approx(value, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_losses_are_ours_and_a_killed_run_resumes_in_the_same_bits_or_by_ours(text_file, tmp_path):
    def options(name=None, **more):
        saved = {} if name is None else {"checkpoint": str(tmp_path / name), "checkpoint_every": 2}
        return TrainOptions(**TINY, data=text_file, **saved, **more)

    def run(*runs):
        # Not by the files of killed runs, which tell where dead ranks were.
        for left in tmp_path.glob("meeting*"):
            left.unlink()
        return run_on_ranks(_train, 2, runs, tmp_path / "meeting", timeout_s=100, backend=None)[0]

    with pytest.raises(RanksFailed, match="SIGKILL"):
        run(options("fsdp2", **FSDP2, kill_at_step=3))
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run(options("ours", kill_at_step=3))
    ours, whole, taken_over, resumed, changed = run(
        options(),
        options(**FSDP2),
        options("ours", resume=True, **FSDP2),
        options("fsdp2", resume=True, **FSDP2),
        options(**FSDP2, compute="bf16", clip=0.0),
    )
    assert (whole.use_torch_fsdp2, whole.zero, whole.wire_bytes_per_step) == (True, 3, None)
    assert not ours.use_torch_fsdp2
    for result in (whole, taken_over, resumed):
        assert result.loss_first == _close(ours.loss_first)
        assert result.loss_last == _close(ours.loss_last)
        assert result.loss_held_out == _close(ours.loss_held_out)
    assert (taken_over.first_step, resumed.first_step) == (3, 3)
    assert resumed.params_sha256 == whole.params_sha256
    assert changed.loss_last == pytest.approx(ours.loss_last, rel=1e-2)
    assert changed.params_sha256 != whole.params_sha256


def _alone(rank, world_size, options, log):
    """Without a launcher, as `--nproc 1` is; what it says goes to `log`."""
    with open(log, "w") as file, redirect_stdout(file), redirect_stderr(file):
        return trainer.train(plan_run(options, 1), Place())


@pytest.mark.parametrize(("value", "warns"), [("1", True), ("8", False)], ids=["1", "8"])
def test_one_rank_trains_alone_and_one_queue_is_warned_of(value, warns, text_file, tmp_path):
    options = TrainOptions(**TINY | {"steps": 2}, data=text_file, **FSDP2)
    log = tmp_path / "log"
    [result] = run_on_ranks(
        _alone, 1, options, str(log), backend=None, env={"CUDA_DEVICE_MAX_CONNECTIONS": value}
    )
    assert result.world == 1
    assert (engines.ONE_QUEUE in log.read_text()) is warns


def _spoilt(rank, world_size, options):
    loss_of = batches.window_loss

    def loss(*arguments):
        value = loss_of(*arguments)
        return value + (0 * value).sqrt()  # which is finite, and its gradient is not

    with mock.patch.object(batches, "window_loss", loss):
        trainer.train(plan_run(options, 1), Place())


def test_a_gradient_that_is_nan_ends_a_run_that_does_not_clip(text_file):
    options = TrainOptions(**TINY | {"steps": 1}, data=text_file, clip=0.0, **FSDP2)
    with pytest.raises(RanksFailed, match="NonFiniteRunError: expected finite losses"):
        run_on_ranks(_spoilt, 1, options, backend=None)


def test_replicas_are_a_second_axis(text_file, tmp_path):
    runs = [
        TrainOptions(**TINY, data=text_file, dp_outer=2),
        TrainOptions(**TINY, data=text_file, dp_outer=2, **FSDP2),
    ]
    ours, theirs = run_on_ranks(_train, 2, runs, tmp_path / "meeting", backend=None)[0]
    assert theirs.loss_last == _close(ours.loss_last)
