import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from sidestream.cli import main
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.training.processes import one_thread_each, runs
from sidestream.training.launch.interruption import Interrupted, noting_signals, raising_signals
from sidestream.training.launch.launch_folder import launch_folder
from sidestream.training.launch.launcher import launch

# Ranks of a training end at once on these signals, wherever they stand.
RANK = """
import os, signal, sys, time
rank, parent = int(os.environ["RANK"]), os.getppid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
open(os.environ["PIDS"] + "/" + str(rank), "w").write(str(os.getpid()))
while len(os.listdir(os.environ["PIDS"])) < 2: time.sleep(0.02)
"""
LAUNCHER = """
import sys
from sidestream import cli
from sidestream.training.launch.launcher import launch
class Command:
    add_parser = lambda parsers: parsers.add_parser("x").set_defaults(
        run=lambda _: launch([sys.executable, "-c", sys.stdin.read()], 2)
    )
cli.COMMANDS = {"x": ""}
cli.importlib.import_module = lambda *_: Command
sys.exit(cli.main(["x"]))
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TRAIN = ["train", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "12"]
TRAIN += ["--steps", "100"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("who", ["launcher", "group", "rank"])
def test_all_end_in_seconds_with_the_signal_as_the_code_and_no_traceback(who, number, tmp_path):
    sends = {
        "launcher": f"if rank == 1: os.kill(parent, {int(number)})",
        "group": f"if rank == 1: os.killpg(0, {int(number)})",
        "rank": f"if rank == 1: os.kill(os.getpid(), {int(number)})",
    }
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        input=f"{RANK}{sends[who]}\ntime.sleep(100)",
        env={**os.environ, "PIDS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    assert time.monotonic() - started < 30
    assert run.returncode == 128 + number
    expected = {
        "rank": rf"sidestream: rank 1 was killed by {number.name}\n",
        "launcher": rf"sidestream: interrupted by {number.name}\n",
    }
    expected["group"] = f"{expected['launcher']}|sidestream: rank . was killed by {number.name}\n"
    assert re.fullmatch(expected[who], run.stderr), run.stderr
    # Empty: the signal came while it was being written.
    assert not any(runs(int(pid)) for path in tmp_path.iterdir() if (pid := path.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_training_that_is_told_to_end_leaves_its_last_checkpoint_whole(tmp_path):
    saving = [*TRAIN, "--checkpoint", str(tmp_path / "saved")]
    environment = one_thread_each()
    command = [sys.executable, "-m", "sidestream", *saving]
    command += ["--nproc", "2", "--checkpoint-every", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as run:
        while "step-00000003" not in run.stdout.readline():
            assert run.poll() is None
        os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        assert run.wait(timeout=10) == 128 + signal.SIGINT
        told = run.stderr.read()
        run.stdout.read()
    assert "Traceback" not in told
    assert told.count("\n") <= 3, told
    newest = int(max((tmp_path / "saved").glob("step-*.json")).stem.removeprefix("step-"))
    told = run_on_ranks(_resume, 1, [*saving, "--nproc", "1", "--resume"], backend=None)[0]
    assert f"resuming after step {newest} " in told


def _resume(rank, world_size, arguments):
    """What the command prints, in a process that has one thread and torch loaded."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(arguments) == 0
    return output.getvalue()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_run_of_one_rank_is_interrupted_where_it_stands_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"interrupted by {number.name}"), raising_signals():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert signal.getsignal(number) is before


def test_a_run_that_is_raised_once_passes_over_what_comes_after():
    done = False
    with pytest.raises(Interrupted, match="SIGINT"), raising_signals(once=True):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            done = True
    assert done


def test_who_notes_signals_is_not_cut_short_and_raises_the_first():
    with pytest.raises(Interrupted, match="SIGTERM"), noting_signals() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        noted.raise_noted()


def test_a_signal_that_was_ignored_before_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raising_signals():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- what killed launchers leave


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_next_launch_removes_the_folder_of_a_killed_launcher(temporary):
    code = (
        "import os, signal, sys, tempfile\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        "from sidestream.training.launch.launcher import launch\n"
        "launch([sys.executable, '-c', 'import os, signal; os.kill(os.getppid(), 9)'], 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(list(temporary.glob("sidestream-ranks-*/launcher.lock"))) == 1
    assert launch([sys.executable, "-c", ""], 1) == 0
    assert list(temporary.iterdir()) == []


def test_folders_in_use_and_those_that_are_not_ours_stay(temporary):
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "launcher.lock").touch()
    (temporary / "sidestream-ranks-link").symlink_to(temporary / "elsewhere")
    (temporary / "sidestream-ranks-other").mkdir()
    os.mkdir(temporary / "sidestream-ranks-pipe")
    os.mkfifo(temporary / "sidestream-ranks-pipe" / "launcher.lock")
    (temporary / "sidestream-ranks-file").touch()
    with launch_folder() as first, launch_folder():
        assert (first / "launcher.lock").exists()
        left = {path.name for path in temporary.iterdir()}
    assert {f"sidestream-ranks-{name}" for name in ("link", "other", "pipe", "file")} <= left
    assert (temporary / "elsewhere" / "launcher.lock").exists()
