import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from sidestream.training.launch.boards import BEAT_BYTES, Beat, FolderBoard, StoreBoard, beat_from
from sidestream.training.launch.heartbeat import Heart, Silence, Whereabouts
from sidestream.training.launch.launcher import launch

# Ranks that beat fast and wait for one another as a training does: in C code, for ever.
RANK = """
import os, pathlib, signal, sys, time
from sidestream.training.launch import heartbeat
from sidestream.training.launch.boards import FolderBoard, board_of_store
heartbeat.BEAT_S, heartbeat.VERDICT_GRACE_S = 0.2, 0.4
rank, folder = int(os.environ["RANK"]), os.environ.get("SIDESTREAM_LAUNCHED")
places = heartbeat.Whereabouts()
def board():
    return FolderBoard(pathlib.Path(folder)) if folder else board_of_store(os.environ, rank, 5.0)
others = [] if folder else [1, 2] if rank == 0 else [0]
heart = heartbeat.Heart(
    rank, places, board, others, heartbeat.Silence(3.0, 20.0, time.monotonic())
)
heart.start()
time.sleep(0.5)
places.doing = "in step 7"
time.sleep(0.5)
"""
WAIT = "signal.pause()\n"


@pytest.fixture(autouse=True)
def _fast_beats(monkeypatch):
    monkeypatch.setattr("sidestream.training.launch.launcher.BEAT_S", 0.1)


def _command(code):
    return [sys.executable, "-c", RANK + code]


# ---- how long nothing was heard


def _beats(**counts):
    return {int(name[1:]): Beat(count, 0, "in step 7") for name, count in counts.items()}


def test_a_rank_is_silent_once_its_beats_stand_still_for_the_limit():
    silence = Silence(20.0, 20.0)
    for second in range(31):
        silence.listen(_beats(r0=second, r1=min(second, 5)), second)
        assert silence.silent([0, 1], second) == ([1] if second > 25 else [])
    assert silence.verdict([1], 30).startswith("rank 1 has not been heard of for 25 s (in step 7):")


def test_those_that_stopped_in_the_same_moment_are_named_together():
    silence = Silence(20.0, 20.0)
    for second in range(22):
        silence.listen(_beats(r0=second, r1=0, r2=min(second, 1), r3=min(second, 9)), second)
    assert silence.silent(range(4), 20) == []
    assert silence.silent(range(4), 21) == [1, 2]


def test_a_rank_that_never_beats_counts_from_the_first_beat_of_another():
    silence = Silence(20.0, 60.0)
    for second in range(100, 161):
        silence.listen({}, second)  # all of them import torch
        assert silence.silent([0, 1], second) == []
    for second in range(161, 230):
        silence.listen(_beats(r0=second), second)
        assert silence.late([0, 1], second) == ([1] if second > 181 else [])
        assert silence.silent([0, 1], second) == ([1] if second > 221 else [])
    assert "rank 1 has not been heard of for 68 s (starting)" in silence.verdict([1], 229)


def test_who_listens_and_was_stopped_itself_forgives_that_time():
    silence = Silence(20.0, 20.0)
    for second in (0, 1, 2, *range(3602, 3630)):
        silence.listen(_beats(r0=min(second, 2)), second)
        assert silence.silent([0], second) == ([0] if second > 3622 else [])


def test_a_rank_that_said_it_ends_is_never_silent():
    silence = Silence(20.0, 20.0)
    for second in range(100):
        silence.listen({0: Beat(9, 0, "ended")}, second)
    assert silence.silent([0], 99) == []


# ---- boards


@pytest.fixture(params=["folder", "store"])
def board(request, tmp_path):
    return FolderBoard(tmp_path) if request.param == "folder" else StoreBoard(dist.HashStore())


def test_beats_and_the_first_verdict_are_read_back(board):
    assert board.beats([0, 1, 2]) == {}
    assert board.verdict() == ""
    board.post(1, Beat(10, 0, "saving step 20"))
    board.post(1, Beat(11, 3, "in step 21"))
    assert board.beats([0, 1, 2]) == {1: Beat(11, 3, "in step 21")}
    board.judge("rank 2 \udcff\N{SNOWMAN}".encode("utf-8", "replace").decode())
    board.judge("rank 0")
    assert board.verdict() == "rank 2 ?\N{SNOWMAN}"


@pytest.mark.parametrize(
    "content", [b"", b"1", b"1 2", b"x 2 in", b"1 \xff in", b" " * 512], ids=str
)
def test_half_a_beat_is_none(content):
    assert beat_from(content) is None


def test_a_place_of_any_length_is_a_beat_of_bounded_size():
    encoded = Beat(1, 2, "\N{SNOWMAN}" * BEAT_BYTES).encoded()
    assert len(encoded) == BEAT_BYTES
    assert beat_from(encoded).doing.startswith("\N{SNOWMAN}" * 100)


def test_the_place_says_for_how_long_where_that_is_long():
    assert Beat(1, 2, "in step 7").place() == "in step 7"
    assert Beat(1, 312, "in step 7").place() == "in step 7 for 312 s"


# ---- our launcher


@pytest.mark.timeout(60)
def test_a_stopped_rank_is_named_with_its_place_and_ends_the_others(capfd):
    code = f"if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n{WAIT}"
    assert launch(_command(code), 3, silence=Silence(4.0, 20.0)) == 128 + signal.SIGKILL
    told = capfd.readouterr().err
    named = "rank 1 has not been heard of for 4 s (in step 7)"
    assert f"sidestream: {named}" in told
    for rank in (0, 2):
        assert f"sidestream: rank {rank} failed in step 7 (there for" in told
    assert told.count(named) == 3
    assert "still running" not in told


@pytest.mark.timeout(60)
def test_a_rank_that_is_stopped_for_a_moment_goes_on(tmp_path):
    waiting = tmp_path / "pid"
    code = (
        f"if rank == 1:\n    open(r'{waiting}.new', 'w').write(str(os.getpid()))\n"
        f"    os.rename(r'{waiting}.new', r'{waiting}')\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(1)"
    )

    def wake():
        while not waiting.exists():
            time.sleep(0.05)
        time.sleep(1)
        os.kill(int(waiting.read_text()), signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    assert launch(_command(code), 2, silence=Silence(6.0, 20.0)) == 0
    thread.join()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_rank_killed_while_starting_is_named_and_those_that_wait_for_it_end_at_once(capfd):
    code = f"import time\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{WAIT}"
    command = _command(code.replace("import time\n", ""))
    command[2] = command[2].replace('places.doing = "in step 7"', "")
    assert launch(command, 2, silence=Silence(20.0, 20.0)) == 128 + signal.SIGKILL
    told = capfd.readouterr().err
    assert "sidestream: rank 1 was killed by SIGKILL (starting)" in told
    assert "rank 0 failed starting (there for" in told
    assert "with no error of its own): rank 1 was killed by SIGKILL (starting)" in told
    assert "still running" not in told


@pytest.mark.timeout(60)
def test_a_rank_that_hangs_while_its_thread_beats_says_where_once_another_has_failed(capfd):
    code = f"if rank == 0: time.sleep(1); sys.exit('timed out')\n{WAIT}"
    assert launch(_command(code), 2, silence=Silence(20.0, 20.0)) == 1
    told = capfd.readouterr().err
    assert "sidestream: rank 0 exited with code 1 (in step 7)" in told
    line = (RANK + code).count("\n")
    assert "rank 1 failed in step 7 (there for " in told
    assert f" s, at <string>:{line}, with no error of its own): rank 0 exited with code 1" in told


# ---- torchrun and the like: no launcher of ours, a store


def _bare_ranks(code, ranks=(0, 1, 2)):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment.pop("SIDESTREAM_LAUNCHED", None)
    return {
        rank: subprocess.Popen(
            [sys.executable, "-c", RANK + code],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    }


@pytest.mark.timeout(90)
def test_without_our_launcher_the_others_name_the_stopped_rank():
    stopped = 0  # which hosts the store
    code = f"if rank == {stopped}: time.sleep(1); os.kill(os.getpid(), signal.SIGSTOP)\n{WAIT}"
    ranks = _bare_ranks(code)
    try:
        for rank, process in ranks.items():
            if rank != stopped:
                told = process.communicate(timeout=60)[1]
                assert process.returncode == 1
                assert f"rank {rank} failed in step 7 (there for" in told
                assert f"rank {stopped} has not been heard of for 3 s (in step 7)" in told
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()


@pytest.mark.timeout(90)
def test_without_our_launcher_a_rank_that_never_came_is_named():
    rank = _bare_ranks(WAIT, [1])[1]
    try:
        told = rank.stderr.readline()
        while "has not heard of" not in told:
            assert told, "the rank ended"
            told = rank.stderr.readline()
    finally:
        rank.kill()
        rank.communicate()
    assert "rank 1 has not heard of rank 0 for 3 s" in told
    assert "waiting up to 20 s for it" in told


def test_a_rank_that_failed_says_that_the_store_is_gone_where_it_is(monkeypatch):
    class Board(FolderBoard):
        name, is_gone = "the ranks' store at node0:29500", False

        def __init__(self):
            self.posted = threading.Event()

        def post(self, rank, beat):
            self.posted.set()

        def beats(self, ranks):
            if self.is_gone:
                raise dist.DistNetworkError("Connection was likely closed.")
            return {}

        def verdict(self):
            return ""

    monkeypatch.setattr("sidestream.training.launch.heartbeat.BEAT_S", 0.05)
    board = Board()
    heart = Heart(1, Whereabouts("in step 7"), lambda: board, [], Silence(20.0, 20.0))
    heart.start()
    assert board.posted.wait(10)
    try:
        time.sleep(0.2)
        assert heart.whereabouts_of_others(2) == ""
        board.is_gone = True
        told = heart.whereabouts_of_others(2)
    finally:
        heart.leave()
    assert "nothing is known: the ranks' store at node0:29500 does not answer" in told
