"""Runs whose checkpoints and text are in an S3-compatible server, on 127.0.0.1."""

import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.sharding.storage import location_of, write_whole
from sidestream.tests.ranks import RanksFailed, preload, run_on_ranks
from sidestream.tests.s3 import BUCKET, serving
from sidestream.tests.training.processes import parse_result
from sidestream.training import trainer
from sidestream.training.checkpoints import newest_checkpoint
from sidestream.training.data import load_corpus
from sidestream.training.errors import CheckpointError, DataError, OptionsError
from sidestream.training.launch.ranks import Place
from sidestream.training.options import TrainOptions
from sidestream.training.paths import require_writable_place
from sidestream.training.plan import plan_run

pytest.importorskip("s3fs")
pytest.importorskip("moto")
preload("sidestream.training.trainer")

TINY = {"device": "cpu", "model": "tiny", "seq_len": 16, "batch": 8, "steps": 4}
RUN = f"s3://{BUCKET}/run"


@pytest.fixture(scope="module")
def s3(text_file):
    with serving() as server:
        text = Path(text_file).read_bytes()
        for name, part in {"b.txt": text[1000:], "a.txt": text[:1000], ".c": b"no"}.items():
            write_whole(location_of(f"s3://{BUCKET}/text/{name}"), part)
        write_whole(location_of(f"s3://{BUCKET}/text/image"), b"\0\1")
        yield server


def _train(rank, world_size, options, meeting):
    place = Place(rank, world_size, rank, world_size, f"file://{meeting}")
    result = trainer.train(plan_run(options, world_size), place)
    return result.params_sha256, result.first_step


def test_a_killed_run_goes_on_from_its_bucket(s3, text_file, tmp_path):
    whole = TrainOptions(**TINY, data=text_file)
    expected, _ = run_on_ranks(_train, 2, whole, str(tmp_path / "m"), backend=None)[0]
    there = {
        **TINY,
        "data": f"s3://{BUCKET}/text",
        "checkpoint": RUN,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
    }
    killed = TrainOptions(**there, kill_at_step=3)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_on_ranks(_train, 2, killed, str(tmp_path / "k"), backend=None)
    assert newest_checkpoint(RUN).step == 3
    with pytest.raises(CheckpointError, match=f"no checkpoints in {RUN} yet, got one of step 3"):
        plan_run(TrainOptions(**there), 2)
    resumed = TrainOptions(**there, resume=True)
    assert run_on_ranks(_train, 2, resumed, str(tmp_path / "r"), backend=None)[0] == (expected, 4)
    left = {name.split("/")[0] for name in s3.names("run")}
    assert left == {f"step-0000000{step}{end}" for step in (3, 4) for end in ("", ".json")}


def test_text_is_that_of_the_files_in_order(s3, text_file):
    local = load_corpus(text_file, seq_len=16)
    there = load_corpus(f"s3://{BUCKET}/text", seq_len=16)
    assert (there.sha256, there.num_files) == (local.sha256, 2)
    assert load_corpus(f"s3://{BUCKET}/text/b.txt", seq_len=16).num_files == 1


def test_objects_that_are_not_needed_are_not_looked_at(s3, monkeypatch):
    monkeypatch.setattr("sidestream.training.data._below", lambda url: iter([url / "a.txt", None]))
    assert load_corpus(f"s3://{BUCKET}/text", seq_len=16, max_bytes=500).num_bytes == 500


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("gs://bucket/text", "gcsfs"),
        ("s3://", "expected a URL"),
        (f"s3://{BUCKET}/absent", "got nothing there"),
        ("s3://absent/text", "got nothing there"),
    ],
    ids=["no driver", "no place", "no text", "no bucket"],
)
def test_text_that_is_not_there_is_told(s3, data, told):
    with pytest.raises(DataError, match=told):
        load_corpus(data, seq_len=16)


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("gs://bucket/run", "gcsfs"),
        ("s3://absent/run", "bucket does not exist"),
        ("s3://", "expected a URL"),
    ],
    ids=["no driver", "no bucket", "no place"],
)
def test_where_nothing_can_be_written_is_told_before_the_run(s3, folder, told):
    with pytest.raises(OptionsError, match=f"place to write to for --checkpoint, got .*{told}"):
        require_writable_place(folder, "--checkpoint")


def test_where_something_can_be_written_nothing_is_left(s3):
    require_writable_place(f"s3://{BUCKET}/other", "--checkpoint")
    assert s3.names("other") == []


def test_a_server_that_refuses_is_told(s3):
    with s3.refusing_everybody():
        with pytest.raises(CheckpointError, match=f"can be read, got {RUN}"):
            newest_checkpoint(RUN)
        with pytest.raises(DataError, match="check the URL and its credentials"):
            load_corpus(f"s3://{BUCKET}/text", seq_len=16)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command(s3, text_file):
    options = [
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--seq-len",
        "16",
        "--batch",
        "8",
        "--nproc",
        "2",
    ]
    command = [sys.executable, "-m", "sidestream", "train", *options, "--data", text_file]
    command += ["--checkpoint", f"s3://{BUCKET}/command", "--checkpoint-every", "2"]

    def run(*arguments):
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200)

    assert run("--steps", "4", "--kill-at-step", "3").returncode != 0
    resumed = run("--steps", "4", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert parse_result(resumed.stdout)["first_step"] == 3
    told = run("--steps", "4")
    assert told.returncode == 2 and "Traceback" not in told.stderr
    assert "expected no checkpoints" in told.stderr
