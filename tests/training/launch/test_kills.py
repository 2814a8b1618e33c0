"""Kills trainings with SIGKILL at random moments, in saves too, and resumes them: the bits are
those of a run that nobody killed.

`SIDESTREAM_KILLS=20 pytest tests/training/launch/test_kills.py -s` kills that many ranks, and
commands.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.training.processes import one_thread_each
from sidestream.training import checkpoints, step_file, trainer
from sidestream.training.launch.ranks import Place
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run

KILLS = int(os.environ.get("SIDESTREAM_KILLS", "3"))
COMMAND_KILLS = int(os.environ.get("SIDESTREAM_KILLS", "1"))  # each starts Python three times
STEPS = 12
TINY = {"device": "cpu", "model": "tiny", "seq_len": 16, "batch": 8, "steps": STEPS}
SAVING = {"checkpoint_every": 1, "keep_checkpoints": 2}


@pytest.fixture(scope="module")
def expected(text_file, tmp_path_factory):
    """The checksum of the parameters that a run ends with which nobody kills, from step 1 on."""
    whole = TrainOptions(**TINY, data=text_file)
    meeting = tmp_path_factory.mktemp("whole") / "m"
    sha256, first_step = run_on_ranks(_train, 2, whole, str(meeting), {}, backend=None)[0]
    assert first_step == 1
    return sha256


# ---- ranks without a launcher, killed by a thread of their own


def _train(rank, world_size, options, meeting, killed):
    if rank in killed:
        _kill_soon(killed[rank])
    place = Place(rank, world_size, rank, world_size, f"file://{meeting}")
    result = trainer.train(plan_run(options, world_size), place)
    return result.params_sha256, result.first_step


def _kill_soon(moment):
    """Die `delay_s` after the save of `step` has begun, which may be before it is over."""
    step, delay_s = moment
    save = checkpoints.save_run

    def begin(saved, *args, **kwargs):
        if saved.step == step:
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        save(saved, *args, **kwargs)

    checkpoints.save_run = begin


def _options(text_file, folder, *, resume):
    return TrainOptions(**TINY, **SAVING, data=text_file, checkpoint=str(folder), resume=resume)


@pytest.mark.timeout(60 + 20 * KILLS)
def test_killed_and_resumed_ranks_end_in_the_same_bits(text_file, expected, tmp_path):
    moments = random.Random(0)
    for count in range(KILLS):
        folder = tmp_path / f"saved-{count}"
        killed = {
            rank: (moments.randint(2, STEPS - 1), moments.uniform(0, 0.06))
            for rank in ([0], [1], [0, 1])[count % 3]
        }
        options = _options(text_file, folder, resume=False)
        with pytest.raises(RanksFailed, match="SIGKILL"):
            run_on_ranks(_train, 2, options, str(tmp_path / f"k{count}"), killed, backend=None)
        options = _options(text_file, folder, resume=True)
        resumed = run_on_ranks(_train, 2, options, str(tmp_path / f"r{count}"), {}, backend=None)
        sha256, first_step = resumed[0]
        assert (sha256, first_step > 1) == (expected, True), (count, killed)
        left = sorted(path.name for path in folder.iterdir())
        assert left == [
            step_file.folder_name(step) + end
            for step in (STEPS - 1, STEPS)
            for end in ("", ".json")
        ]
        print(f"kill {count + 1} of {KILLS} ranks {killed}: bit-equal")


# ---- the command, killed from outside


def _command(text_file, *arguments):
    command = [sys.executable, "-m", "sidestream", "train", "--nproc", "2", "--data", text_file]
    return [*command, *_arguments(TINY), *map(str, arguments)]


def _arguments(options):
    return [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def _kill(who, launcher_pid):
    ranks = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
    victims = {"rank": ranks[-1:], "all": ranks, "launcher": [launcher_pid]}[who]
    for pid in victims:
        os.kill(int(pid), signal.SIGKILL)


def _run_killed(command, who, step, delay_s):
    """Run `command` and SIGKILL `who` a while after `step` was saved; return the exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=one_thread_each(), **pipes) as run:
        for line in run.stdout:
            if re.search(f"saved .*{step_file.folder_name(step)}", line):
                time.sleep(delay_s)
                _kill(who, run.pid)
                break
        run.stdout.read()  # ends once all ranks have
        return run.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * COMMAND_KILLS)
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds ranks in /proc")
def test_a_command_whose_processes_are_killed_resumes_to_the_same_bits(
    text_file, expected, tmp_path
):
    moments = random.Random(1)
    for count in range(COMMAND_KILLS):
        who = ("launcher", "rank", "all")[count % 3]
        step, delay_s = moments.randint(1, STEPS - 4), moments.uniform(0, 0.1)
        saving = ["--checkpoint", tmp_path / f"saved-{count}", *_arguments(SAVING)]
        code = _run_killed(_command(text_file, *saving), who, step, delay_s)
        assert code == (-signal.SIGKILL if who == "launcher" else 128 + signal.SIGKILL), who
        # By ranks that have torch loaded; the demo resumes by the command.
        options = _options(text_file, tmp_path / f"saved-{count}", resume=True)
        meeting = str(tmp_path / f"m{count}")
        resumed = run_on_ranks(_train, 2, options, meeting, {}, backend=None)
        sha256, first_step = resumed[0]
        assert (sha256, first_step > 1) == (expected, True), (who, step, delay_s)
        print(f"kill {count + 1} of {COMMAND_KILLS} {who} after step {step}: bit-equal")
