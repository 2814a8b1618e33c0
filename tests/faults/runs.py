"""Trainings in which faults happen: the command's own ranks, in processes that have torch loaded.

The test hosts the store in which they meet, as torchrun's agent does, and each rank runs what
`sidestream train` runs under torchrun, by default with beats ten times as fast as in earnest.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from sidestream.cli import main
from sidestream.sharding.checkpoint.digests import require_sums
from sidestream.sharding.checkpoint.opening import open_checkpoint
from sidestream.tests.faults.seams import Fault, arm
from sidestream.tests.ranks import RanksFailed, preload, run_on_ranks
from sidestream.training import step_file
from sidestream.training.launch import heartbeat

preload("sidestream.training.trainer", "sidestream.training.train_command", __name__)

STEPS = 8
LIMIT_S = 30
TINY = ["--device", "cpu", "--model", "tiny", "--seq-len", "16", "--batch", "12"]
TINY += ["--steps", f"{STEPS}"]
EVERY_STEP = ["--checkpoint-every", "1", "--keep-checkpoints", "2"]
BEAT_S = 0.1
_OURS = re.compile(r"step-\d{8}(\.json)?")
_IGNORED = re.compile(r"\.step-\d{8}(\.json)?\.partial|\.step-\d{8}\.replaced")


@dataclass
class Outcome:
    """How a run ended: the exit code or what ended it, by rank; what ranks said; how long after the
    fault the last of the others had ended, None where there was no fault; the figures of rank 0.
    """

    ends: dict[int, object]
    said: dict[int, str]
    error_s: float | None = None
    result: dict[str, object] = field(default_factory=dict)

    @property
    def all_said(self) -> str:
        return "\n".join(self.said.values())


def run(
    arguments: Sequence[str],
    world_size: int,
    folder: Path,
    fault: Fault | None = None,
    *,
    beat_s: float = BEAT_S,
) -> Outcome:
    """Train as `sidestream train *arguments` on ranks of this machine, one of which has `fault`."""
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = ["train", *arguments, "--json", str(result)]
    ends: dict[int, object]
    try:
        values = run_on_ranks(
            _be_rank,
            world_size,
            (command, fault, str(folder), beat_s),
            timeout_s=90,
            backend=None,
            env=environment,
        )
        ends = dict(enumerate(values))
    except RanksFailed as failed:
        ends = {**failed.values, **failed.failures}
    said = {
        rank: (folder / f"said-{rank}").read_text(errors="replace") for rank in range(world_size)
    }
    figures = json.loads(result.read_text()) if result.exists() else {}
    result.unlink(missing_ok=True)
    return Outcome(ends, said, _error_s(folder, world_size, fault), figures)


class Unbroken:
    """Runs with `arguments` in which nothing happens, each done once."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._sha256: dict[tuple[int, int], str] = {}

    def sha256(self, world_size: int = 2, zero: int = 3) -> str:
        """The checksum of the parameters that such a run of so many ranks ends with."""
        key = world_size, zero
        if key not in self._sha256:
            ended = run([*job(zero), *self._arguments], world_size, self._folder)
            assert set(ended.ends.values()) == {0}, ended
            self._sha256[key] = str(ended.result["params_sha256"])
        return self._sha256[key]


def job(zero: int = 3) -> list[str]:
    """The options of the training of all these tests."""
    return [*TINY, "--zero", f"{zero}"]


def saving(folder: Path, *, resume: bool = False) -> list[str]:
    """The options that have it save each step to `folder`."""
    return [*EVERY_STEP, "--checkpoint", str(folder), *(["--resume"] if resume else [])]


def _be_rank(rank: int, world_size: int, given: tuple[list[str], Fault | None, str, float]) -> int:
    command, fault, folder, heartbeat.BEAT_S = given
    said = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank}
    place |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: f"{value}" for name, value in place.items()})
    if fault is not None:
        end_at_once = os._exit

        def end(code: int) -> None:
            Path(folder, f"ended-{rank}").write_text(repr(time.time()))
            end_at_once(code)

        os._exit = end
        if fault.rank == rank:
            arm(fault)
    return main(command)


def _error_s(folder: Path, world_size: int, fault: Fault | None) -> float | None:
    if fault is None or not Path(fault.told).is_file():
        return None
    others = [folder / f"ended-{rank}" for rank in range(world_size) if rank != fault.rank]
    if not all(other.exists() for other in others):
        return None
    return max(float(end.read_text()) for end in others) - float(Path(fault.told).read_text())


def pids_of(who: str, launcher: int) -> list[int]:
    """Of a running launcher, its last rank or all of them."""
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in {"rank": ranks[-1:], "all": ranks, "launcher": [launcher]}[who]]


def complete_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`: each is whole to its last byte, and all
    else there is what the next save passes over and removes.
    """
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert all(_OURS.fullmatch(name) or _IGNORED.fullmatch(name) for name in names), names
    steps = []
    for name in sorted(names):
        if _OURS.fullmatch(name) and name.endswith(".json"):
            saved = step_file.read_step_file(folder / name.removesuffix(".json"))
            step_file.require_same_index(saved)
            stored = open_checkpoint(saved.path)
            assert stored.digests is not None
            require_sums(saved.path, stored.digests, 0, 1)
            steps.append(saved.step)
    return steps
