"""SIGTERM in a run with checkpoints: all ranks end after the same step, which is saved, with exit
code 0, and the resumed run has the bits of one that nobody asked to stop.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.tests.faults.runs import STEPS, Outcome, complete_steps, job, pids_of, run, saving
from sidestream.tests.faults.seams import SAVING, SEAMS, Fault
from sidestream.tests.training.processes import one_thread_each

LONG = "100000"
STOPPED = r"stopped by SIGTERM after step (\d+) of (\d+), which is saved"


def asked_at(place: str, rank: int, world_size: int, text: list[str], folder: Path) -> Outcome:
    fault = Fault(place, rank, 4, "SIGTERM", str(folder / "told"))
    options = [*job(), *text, "--checkpoint", str(folder / "saved")]
    every = (
        ["--checkpoint-every", "2", "--keep-checkpoints", "1"]
        if SEAMS[place].phase == SAVING
        else []
    )
    return run([*options, *every], world_size, folder, fault)


def resume(text: list[str], world_size: int, folder: Path) -> Outcome:
    saved = folder / "saved"
    return run([*job(), *text, *saving(saved, resume=True)], world_size, folder)


@pytest.mark.parametrize(
    ("place", "world_size"),
    [
        pytest.param(place, 2 + number % 2, id=place, marks=[] if number == 0 else pytest.mark.slow)
        for number, place in enumerate(SEAMS)
    ],
)
def test_all_ranks_finish_the_step_and_save_it(
    place: str, world_size: int, text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    rank = 0 if SEAMS[place].by_first else world_size - 1
    stopped = asked_at(place, rank, world_size, text, tmp_path)
    assert set(stopped.ends.values()) == {0}, stopped
    told = re.findall(STOPPED, stopped.all_said)
    # After the mean of the loss has begun, the next one tells the others.
    last = 5 if place == "mean of the loss" else 4
    assert told in ([("4", f"{STEPS}")], [(f"{last}", f"{STEPS}")]), stopped
    assert "RESULT" not in stopped.all_said and not stopped.result
    step = int(told[0][0])
    assert complete_steps(tmp_path / "saved") == [step]
    resumed = resume(text, world_size, tmp_path)
    assert resumed.result["first_step"] == step + 1
    assert resumed.result["params_sha256"] == unbroken(world_size)


# ---- the command, in earnest


class Command:
    """`sidestream train` in a session of its own, for a long time, as `launcher` starts it."""

    def __init__(
        self,
        text: list[str],
        folder: Path,
        *arguments: str,
        launcher: tuple[str, ...] = (),
    ) -> None:
        options = [*job(), *text, *arguments, "--steps", LONG]
        if "--checkpoint" in arguments:
            options += ["--checkpoint-every", "2", "--keep-checkpoints", "2"]
        launching = [sys.executable, *launcher, "-m", "sidestream", "train", *options]
        self.log = folder / f"log-{time.monotonic_ns()}"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                launching,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=one_thread_each(),
                start_new_session=True,
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while not re.search(text, self.said):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def ended(self) -> int:
        return self.process.wait(timeout=60)


SENDS: dict[str, Callable[[int], object]] = {
    "launcher": lambda pid: os.kill(pid, signal.SIGTERM),
    "rank": lambda pid: os.kill(pids_of("rank", pid)[0], signal.SIGTERM),
    "all": lambda pid: os.killpg(pid, signal.SIGTERM),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("nproc", ["1", "2"])
@pytest.mark.parametrize("who", SENDS)
def test_the_command_exits_with_0_after_a_checkpoint(
    who: str, nproc: str, text: list[str], tmp_path: Path
) -> None:
    if nproc == "1" and who == "rank":
        pytest.skip("one process is both")
    saving_to = ["--nproc", nproc, "--checkpoint", str(tmp_path / "saved")]
    with Command(text, tmp_path, *saving_to) as command:
        command.wait_for("saved .*step-00000002")
        time.sleep(random.Random(who).uniform(0, 0.3))
        SENDS[who](command.process.pid)
        assert command.ended() == 0, command.said
        told = re.findall(STOPPED, command.said)
    assert len(told) == 1 and "RESULT" not in command.said, command.said
    step = int(told[0][0])
    assert complete_steps(tmp_path / "saved")[-1] == step


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("who", SENDS)
def test_ranks_of_torchrun_end_with_0_after_a_checkpoint(
    who: str, text: list[str], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    agent += ("--master-addr", "127.0.0.1", "--master-port", f"{port}")
    saved = tmp_path / "saved"
    with Command(text, tmp_path, "--checkpoint", str(saved), launcher=agent) as command:
        command.wait_for("saved .*step-00000002")
        SENDS[who](command.process.pid)
        code = command.ended()
    # An agent that is told to end says so itself, whatever its ranks do.
    assert (code == 0) == (who == "rank"), command.said
    told = re.findall(STOPPED, command.said)
    assert len(told) == 1 and "RESULT" not in command.said, command.said
    assert complete_steps(saved)[-1] == int(told[0][0])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_who_is_asked_again_ends_at_once(
    nproc: str, number: signal.Signals, text: list[str], tmp_path: Path
) -> None:
    # Steps so long that only the second signal can be what ends them.
    arguments = ["--nproc", nproc, "--checkpoint", str(tmp_path / "saved"), "--accumulate", "10000"]
    with Command(text, tmp_path, *arguments, "--batch", "120000") as command:
        command.wait_for("each rank")
        time.sleep(2)
        os.kill(command.process.pid, signal.SIGTERM)
        time.sleep(0.3)
        started = time.monotonic()
        os.kill(command.process.pid, number)
        code = command.ended()
        assert time.monotonic() - started < 5
        assert code == 128 + number, command.said
    assert f"interrupted by {number.name}" in command.said


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [[], ["--rerun"], ["--checkpoint"]], ids=["without", "without, rerun", "starting"]
)
def test_without_checkpoints_and_while_starting_it_ends_at_once(
    arguments: list[str], text: list[str], tmp_path: Path
) -> None:
    is_starting = arguments == ["--checkpoint"]
    saving_to = [*arguments, str(tmp_path / "saved")] if is_starting else arguments
    with Command(text, tmp_path, "--nproc", "2", *saving_to) as command:
        if is_starting:
            deadline = time.monotonic() + 60
            while len(pids_of("all", command.process.pid)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        else:
            command.wait_for("step +1/")
        os.kill(command.process.pid, signal.SIGTERM)
        started = time.monotonic()
        assert command.ended() == 128 + signal.SIGTERM, command.said
        assert time.monotonic() - started < 10
        assert "which is saved" not in command.said
    assert not complete_steps(tmp_path / "saved")
