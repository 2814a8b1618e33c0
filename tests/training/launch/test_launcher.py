import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sidestream.tests.training.processes import runs
from sidestream.training.launch.interruption import Interrupted
from sidestream.training.launch.launcher import describe_exit, launch, rank_environment

# Ranks of these tests are plain interpreters: what is tested is how they are started and ended,
# not what they do.
HANG = "import time; time.sleep(120)"


def _command(code):
    return [sys.executable, "-c", f"import os, signal, sys\nrank = int(os.environ['RANK'])\n{code}"]


def test_ranks_get_their_places(tmp_path):
    code = f"open(r'{tmp_path}/' + str(rank), 'w').write(os.environ['WORLD_SIZE'])"
    assert launch(_command(code), 3) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("012", "3")


def test_only_the_first_rank_is_heard(capfd):
    assert launch(_command("print('rank', rank)"), 2) == 0
    assert capfd.readouterr().out == "rank 0\n"


@pytest.mark.timeout(30)
def test_killed_rank_ends_the_others(capfd):
    code = f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{HANG}"
    started = time.monotonic()
    assert launch(_command(code), 3, grace_s=0.5) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 10
    told = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL" in told
    assert "waiting up to 0.5 s for ranks 0, 2" in told
    assert "rank 0 was still running 0.5 s later" in told
    assert "rank 2 was still running 0.5 s later" in told


@pytest.mark.timeout(30)
def test_rank_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr("sidestream.training.launch.launcher.TERMINATE_S", 0.3)
    code = f"if rank == 1: sys.exit(7)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HANG}"
    assert launch(_command(code), 2, grace_s=1.0) == 7


def test_survivor_that_raises_is_heard_and_the_killed_one_named_first(capfd):
    code = (
        "import time\n"
        "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(0.3); sys.exit('rank 1 waited for the gather of unit blocks.0')"
    )
    assert launch(_command(code), 2, grace_s=5) == 128 + signal.SIGKILL
    told = capfd.readouterr().err
    assert told.index("rank 0 was killed by SIGKILL") < told.index("rank 1 exited with code 1")
    assert "rank 1 | rank 1 waited for the gather of unit blocks.0" in told


def _refuse(error):
    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    return refuse


# Rank 0 fails with what it reads where all ranks look for the reason.
LISTEN = (
    "import pathlib, time\n"
    "if rank: sys.exit('the reason')\n"
    "verdict = pathlib.Path(os.environ['SIDESTREAM_LAUNCHED'], 'verdict')\n"
    "while not verdict.exists(): time.sleep(0.02)\n"
    "sys.exit(verdict.read_text())"
)


def test_the_verdict_is_left_where_there_are_no_hard_links(monkeypatch, capfd):
    monkeypatch.setattr("os.link", _refuse(errno.EPERM))
    assert launch(_command(LISTEN), 2, grace_s=5) == 1
    told = capfd.readouterr().err
    assert "\nrank 1 exited with code 1" in f"\n{told}"
    assert "rank 1 | the reason" in told and "still running" not in told


def test_a_full_disk_keeps_no_exit_code_and_no_lines_of_a_rank(monkeypatch, capfd):
    monkeypatch.setattr("pathlib.Path.write_text", _refuse(errno.ENOSPC))
    assert launch(_command(LISTEN), 2, grace_s=0.5) == 1
    told = capfd.readouterr().err
    assert "rank 1 | the reason" in told
    assert "rank 0 was still running 0.5 s later" in told


@pytest.mark.timeout(30)
def test_interrupt_ends_all_ranks(tmp_path):
    code = f"open(r'{tmp_path}/' + str(rank), 'w').write(str(os.getpid()))\n{HANG}"

    def interrupt():
        while len([path for path in tmp_path.iterdir() if path.read_text()]) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(_command(code), 2)
    thread.join()
    assert not any(runs(int(path.read_text())) for path in tmp_path.iterdir())


# Ranks that SIGTERM asks to stop: they tell how often it came, and end once they hear of it all.
STOPPING = (
    "import pathlib, time\n"
    "heard = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
    "folder = pathlib.Path({folder!r})\n"
    "(folder / str(rank)).touch()\n"
    "while not heard: time.sleep(0.01)\n"
    "{then}\n"
    "(folder / ('heard' + str(rank))).write_text(str(len(heard)))"
)


ASKED = (
    "import pathlib, time\n"
    "heard = []\n"
    "signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
    "folder = pathlib.Path({folder!r})\n"
    "(folder / str(rank)).touch()\n"
    "while not heard and not (folder / 'asked').exists(): time.sleep(0.01)\n"
    "{then}\n"
    "if heard: (folder / 'asked').write_text(str(rank))"
)


def _signalled(folder, then, *numbers, program=STOPPING):
    """Launch ranks that can stop, and send `numbers` to the launcher once they run."""
    command = _command(program.format(folder=str(folder), then=then))

    def tell():
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        return launch(command, 2, can_stop=True)
    finally:
        thread.join()


@pytest.mark.timeout(30)
def test_ranks_that_can_stop_are_told_once_and_end_themselves(tmp_path, capfd):
    assert _signalled(tmp_path, "time.sleep(0.2)", signal.SIGTERM) == 0
    assert [(tmp_path / f"heard{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert "ranks 0, 1 to end after a step and its checkpoint" in capfd.readouterr().err


@pytest.mark.timeout(30)
def test_ranks_that_were_told_to_stop_are_not_to_start_again_on_other_hardware(tmp_path):
    assert _signalled(tmp_path, "sys.exit(16)", signal.SIGTERM) == 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_launcher_that_is_told_again_ends_ranks_that_would_go_on(number, tmp_path):
    started = time.monotonic()
    with pytest.raises(Interrupted, match=number.name):
        _signalled(tmp_path, "time.sleep(100)", signal.SIGTERM, number)
    assert time.monotonic() - started < 10
    assert not list(tmp_path.glob("heard*"))


@pytest.mark.timeout(30)
def test_a_launcher_that_is_asked_what_goes_on_asks_rank_0(tmp_path):
    assert _signalled(tmp_path, "", signal.SIGUSR1, program=ASKED) == 0
    assert (tmp_path / "asked").read_text() == "0"


@pytest.mark.timeout(60)
def test_rank_ends_when_its_launcher_is_gone():
    code = (
        "from sidestream.training.launch.ranks import follow_launcher\n"
        "import time\nfollow_launcher()\nprint('ready', flush=True)\ntime.sleep(120)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rank.stdout.readline() == b"ready\n"
    rank.stdin.close()
    assert rank.wait(timeout=10) == 1
    rank.stdout.close()


def test_environment_shares_cores_and_keeps_what_the_caller_says(tmp_path, monkeypatch):
    monkeypatch.setattr("sidestream.training.launch.launcher.num_cores", lambda: 6)
    environment = rank_environment({"A": "b"}, 1, 2, tmp_path)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["RANK"] == environment["LOCAL_RANK"] == "1"
    assert environment["A"] == "b"
    assert rank_environment({}, 0, 8, tmp_path)["OMP_NUM_THREADS"] == "1"
    said = {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth7"}
    environment = rank_environment(said, 0, 2, tmp_path)
    assert {name: environment[name] for name in said} == said


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
    ids=["exit", "kill", "segv", "unnamed"],
)
def test_exit_is_described(code, expected):
    assert describe_exit(code) == expected
