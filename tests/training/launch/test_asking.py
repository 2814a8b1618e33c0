"""SIGUSR1 is answered while the main thread hangs in a collective, and changes nothing else."""

import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist

from sidestream.cli import main
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.training.processes import parse_result
from sidestream.training import trainer
from sidestream.training.launch.asking import answering
from sidestream.training.launch.heartbeat import Whereabouts

TRAIN = ["train", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "8"]


def ask():
    os.kill(os.getpid(), signal.SIGUSR1)


def wait_for(capfd, text):
    """What standard error has said once `text` was in it."""
    said, end = "", time.monotonic() + 10
    while text not in said and time.monotonic() < end:
        said += capfd.readouterr().err
        time.sleep(0.01)
    return said


def test_each_signal_is_answered_in_another_thread(capfd):
    threads = []

    def answer():
        threads.append(threading.current_thread().name)
        return f"answer {len(threads)}"

    with answering(answer):
        for count in (1, 2):
            ask()
            assert f"sidestream: answer {count}\n" in wait_for(capfd, f"answer {count}")
    assert threads == ["asked", "asked"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert "asked" not in [thread.name for thread in threading.enumerate()]


def test_other_signals_are_not_taken_for_a_question(capfd):
    noted = []
    before = signal.signal(signal.SIGUSR2, lambda *_: noted.append(True))
    try:
        with answering(lambda: "asked"):
            os.kill(os.getpid(), signal.SIGUSR2)
            ask()
            assert wait_for(capfd, "asked").count("asked") == 1
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert noted


def test_whoever_handles_the_signal_goes_on_doing_so():
    noted = []
    before = signal.signal(signal.SIGUSR1, lambda *_: noted.append(True))
    try:
        with answering(lambda: pytest.fail("not ours to answer")):
            ask()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert noted


def hangs(rank, world_size):
    """Rank 0 is asked while it stands in a barrier that rank 1 comes to late."""
    answered_s = []
    with answering(lambda: answered_s.append(time.monotonic()) or "answered"):
        dist.barrier()
        if rank == 0:
            threading.Timer(0.3, ask).start()
        else:
            time.sleep(1.5)
        dist.barrier()
        ended_s = time.monotonic()
    return ended_s - answered_s[0] if rank == 0 else None


def test_a_rank_that_hangs_answers():
    assert run_on_ranks(hangs, 2)[0] > 0.5


def test_words_without_and_with_a_model():
    where = Whereabouts("loading")
    assert where.told(3) == "rank 3 is loading"
    where.explanation = lambda: "in a backward"
    assert where.told(3) == "rank 3 is loading\nin a backward"


def test_a_training_says_what_it_is_doing(text_file, capfd, monkeypatch):
    said, train_step = [], trainer.train_step

    def asked_meanwhile(run, step, recorder):
        if step == 2:
            ask()
            said.append(wait_for(capfd, "waits in no"))
        return train_step(run, step, recorder)

    monkeypatch.setattr(trainer, "train_step", asked_meanwhile)
    assert main([*TRAIN, "--steps", "3", "--data", text_file]) == 0
    assert re.search(r"sidestream: rank 0 is in step 2\nrank 0 of 1: .*\n  waits in no", said[0])
    assert parse_result(capfd.readouterr().out)["steps"] == 3
