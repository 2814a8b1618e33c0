import math
import shutil
from dataclasses import replace

import pytest
import torch

from sidestream.cli import main
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.training.processes import parse_result
from sidestream.training import checkpoints, step_file, trainer
from sidestream.training.launch.ranks import Place
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = ["train", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "8"]


@pytest.fixture
def train(text_file, capsys):
    def run(*arguments):
        code = main([*TINY, "--steps", "6", "--data", text_file, *map(str, arguments)])
        captured = capsys.readouterr()
        return parse_result(captured.out) if code == 0 else (code, captured.err)

    return run


def _bits(result):
    return [result[name] for name in ("params_sha256", "loss_first", "loss_last", "loss_held_out")]


def test_run_learns_and_reports(train):
    result = train("--steps", 30, "--lr", 1e-2)
    assert result["loss_first"] == pytest.approx(math.log(256), abs=0.1)
    assert result["loss_last"] < 4.0
    assert result["loss_held_out"] < 4.0
    assert result["world"] == 1
    assert result["steps"] == 30
    assert result["peak_mib"] > 0
    assert result["wire_bytes_per_step"] == 0
    tokens_per_step = 8 * 16
    assert result["tokens_per_s"] == pytest.approx(
        1000 * tokens_per_step / result["step_ms_median"], rel=0.1
    )


def test_same_seed_same_bits_other_seed_other_bits(train):
    first = train("--seed", 5)
    assert _bits(train("--seed", 5)) == _bits(first)
    assert train("--seed", 6)["params_sha256"] != first["params_sha256"]


def test_microbatches_change_only_the_rounding(train):
    whole, parts = train(), train("--accumulate", 4)
    # The first loss sees equal weights: FP32 means over 128 values, taken in another order.
    assert parts["loss_first"] == pytest.approx(whole["loss_first"], rel=128 * 2**-24)
    # Adam turns the rounding of near-zero gradients into whole steps of the learning rate.
    assert parts["loss_last"] == pytest.approx(whole["loss_last"], rel=1e-3)


def test_clipping_and_low_precision_take_effect(train):
    results = [
        train(),
        train("--clip", 0.01),
        train("--clip", 0),
        train("--compute", "bf16"),
        train("--dropout", 0.5),
    ]
    assert len({result["params_sha256"] for result in results}) == len(results)
    assert all(result["loss_last"] < result["loss_first"] for result in results)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_resumed_run_ends_in_the_same_bits(train, tmp_path, compute):
    arguments = ["--dropout", 0.2, "--accumulate", 2, "--compute", compute]
    saving = [*arguments, "--checkpoint", tmp_path / "saved", "--checkpoint-every", 2]
    whole = train(*arguments)
    assert _bits(train(*saving)) == _bits(whole)
    (tmp_path / "saved" / "step-00000006.json").unlink()
    shutil.rmtree(tmp_path / "saved" / "step-00000004")
    torch.manual_seed(1234)
    resumed = train(*saving, "--resume")
    assert resumed["first_step"] == 3
    assert _bits(resumed) == _bits(whole)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume", "--seed", 9], "seed: 0 there, 9 now"),
        (["--resume", "--batch", 4], "batch: 8 there, 4 now"),
        (["--resume"], "nothing to resume"),
        ([], "pass --resume to go on from it"),
    ],
    ids=["other_seed", "other_batch", "complete", "not_resumed"],
)
def test_checkpoints_of_another_run_are_refused(train, tmp_path, arguments, expected):
    train("--checkpoint", tmp_path)
    code, error = train("--checkpoint", tmp_path, *arguments)
    assert code == 2
    assert expected in error


def test_a_checkpoint_of_another_step_does_not_resume(train, tmp_path):
    train("--checkpoint", tmp_path, "--checkpoint-every", 2)
    for left in ("step-00000006", "step-00000004"):
        shutil.rmtree(tmp_path / left)
    # Somebody made the file anew, so all agree but what the checkpoint itself says.
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000004")
    saved = checkpoints.newest_checkpoint(str(tmp_path))
    step_file.write_step_file(replace(saved, step=4))
    code, error = train("--checkpoint", tmp_path, "--resume")
    assert code == 2
    assert "the state after step 4" in error and "'step': 2}" in error


def test_other_data_does_not_resume(train, tmp_path):
    train("--checkpoint", tmp_path / "saved")
    other = tmp_path / "other.txt"
    other.write_text("something else " * 100)
    code, error = train("--checkpoint", tmp_path / "saved", "--resume", "--data", other)
    assert code == 2
    assert "data_sha256" in error


def _fingerprint(rank, world_size, options, meeting):
    place = Place(rank, world_size, rank, world_size, f"file://{meeting}")
    return trainer.train(plan_run(options, world_size), place).params_sha256


def test_fingerprint_is_of_all_ranks_parameters(text_file, tmp_path):
    tiny = {"device": "cpu", "model": "tiny", "seq_len": 16, "batch": 8, "steps": 2}
    fingerprints = []
    for zero in range(4):
        options = TrainOptions(**tiny, data=text_file, zero=zero)
        meeting = str(tmp_path / str(zero))
        fingerprints.append(run_on_ranks(_fingerprint, 2, options, meeting, backend=None)[0])
    # The same bits at every level, and at ZeRO-0 rank 0 holds all of every parameter.
    assert set(fingerprints) == {fingerprints[0]}
