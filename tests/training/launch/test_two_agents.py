"""Two agents of torchrun with two ranks each, as on two machines: one is killed, the other one's
ranks end and say so, and a restart of both ends in the bits of a run that nobody disturbed.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.training.processes import one_thread_each, parse_result, runs
from sidestream.training import trainer
from sidestream.training.checkpoints import newest_checkpoint
from sidestream.training.launch.ranks import Place
from sidestream.training.options import TrainOptions
from sidestream.training.plan import plan_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds ranks in /proc"),
]
STEPS = 100
LIMIT_S = 100
TINY = {"device": "cpu", "model": "tiny", "seq_len": 16, "batch": 8, "steps": STEPS, "seed": 3}
# By the agent that is killed: the first one hosts the store in which the ranks meet.
MESHES = {
    0: {"dp_outer": 2, "outer_strategy": "optim"},
    1: {"ranks_per_node": 2, "zero": 2},
}


def _train(rank, world_size, options, meeting):
    place = Place(rank, world_size, rank % 2, 2, f"file://{meeting}")
    return trainer.train(plan_run(options, world_size), place).params_sha256


class Agents:
    """Both agents of one run, and all that they print."""

    def __init__(self, folder, arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.logs = [folder / f"agent-{node}.log" for node in (0, 1)]
        self.processes = []
        self.ranks = set()
        for node, log in enumerate(self.logs):
            command = [sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
            command += ["--master-addr", "127.0.0.1", "--master-port", self.port]
            command += ["-m", "sidestream", "train", *arguments]
            with log.open("w") as output:
                environment = {**one_thread_each(), "GLOO_SOCKET_IFNAME": "lo"}
                self.processes.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, env=environment
                    )
                )

    def ranks_of(self, node):
        pid = self.processes[node].pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.ranks.update(map(int, found))
        return [int(rank) for rank in found]

    def text(self, node):
        return self.logs[node].read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node, process in enumerate(self.processes):
            if process.poll() is None:
                self.ranks_of(node)
                process.kill()
                process.wait()
        for rank in self.ranks:
            if runs(rank):
                os.kill(rank, signal.SIGKILL)


def _wait_until(is_so, agents):
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        ended = all(process.poll() is not None for process in agents.processes)
        assert time.monotonic() < deadline and not ended, agents.text(0) + agents.text(1)
        time.sleep(0.02)


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("killed", MESHES, ids=["hsdp-first", "hierarchical-last"])
def test_a_killed_agent_is_told_and_a_restart_ends_in_the_same_bits(killed, text_file, tmp_path):
    mesh = MESHES[killed]
    options = TrainOptions(**TINY, **mesh, data=text_file)
    undisturbed = run_on_ranks(_train, 4, options, str(tmp_path / "m"), backend=None)[0]
    arguments = [
        part
        for name, value in {**TINY, **mesh}.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    saved = tmp_path / "saved"
    arguments += ["--data", text_file, "--checkpoint", str(saved)]

    saving = ["--checkpoint-every", "10", "--keep-checkpoints", "2"]
    with Agents(tmp_path, [*arguments, *saving]) as agents:
        _wait_until(lambda: saved.exists() and newest_checkpoint(str(saved)), agents)
        orphans = agents.ranks_of(killed)
        agents.processes[killed].kill()
        code = agents.processes[1 - killed].wait(LIMIT_S)
        told = agents.text(1 - killed)
        assert code == 1, told
        # Its ranks, which nobody ends, end by themselves.
        deadline = time.monotonic() + LIMIT_S
        while any(map(runs, orphans)):
            assert time.monotonic() < deadline, agents.text(killed)
            time.sleep(0.02)
        assert len(re.findall("torchrun's agent, which started", agents.text(killed))) == 2
    gone = "|".join(str(2 * killed + rank) for rank in (0, 1))
    who = f"rank ({gone})" if killed else rf"store at 127.0.0.1:{agents.port} does not answer"
    told_by = [line for line in told.splitlines() if re.match(r"sidestream: rank \d failed", line)]
    assert any(re.search(who, line) for line in told_by), told
    assert "RESULT" not in told
    step = newest_checkpoint(str(saved)).step
    assert step < STEPS

    with Agents(tmp_path, [*arguments, "--resume"]) as agents:
        codes = [process.wait(LIMIT_S) for process in agents.processes]
        assert codes == [0, 0], agents.text(0) + agents.text(1)
        result = parse_result(agents.text(0))
    assert (result["params_sha256"], result["first_step"]) == (undisturbed, step + 1)
