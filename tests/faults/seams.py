"""Where faults meet a rank of a training, and what they do there.

    Fault("gradient exchange", rank=1, step=3, act="kill")
      |      a place is a call of the package inside one step, or inside its save
      `--    arm(fault) wraps that call in the process of the rank

A seam of a checkpoint that rank 0 alone comes by is `by_first`.
"""

import errno
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestream.training.launch.heartbeat import Whereabouts

STEPPING, SAVING = "in", "saving"


@dataclass(frozen=True)
class Seam:
    """Before or after the `call`-th call of `target` (module:attribute) in a phase of a step, at
    ZeRO levels from `min_zero`.
    """

    phase: str
    target: str
    when: str
    call: int = 1
    by_first: bool = False
    min_zero: int = 0


SEAMS = {
    "forward": Seam(STEPPING, "sidestream.training.model:Block.forward", "after"),
    "parameter gather": Seam(
        STEPPING, "sidestream.sharding.collectives:Channel.gather", "after", min_zero=1
    ),
    "backward": Seam(STEPPING, "sidestream.sharding.wire:GradientPacker.take", "before", 2),
    "gradient exchange": Seam(
        STEPPING, "sidestream.sharding.collectives:Channel.exchange", "after", 2
    ),
    "optimizer step": Seam(STEPPING, "torch.optim.adam:adam", "after"),
    "mean of the loss": Seam(STEPPING, "torch.distributed:all_reduce", "before"),
    "data file begun": Seam(
        SAVING, "sidestream.sharding.checkpoint.digests:DigestedFile._write", "before"
    ),
    "data file half written": Seam(
        SAVING, "sidestream.sharding.checkpoint.digests:DigestedFile._write", "before", 5
    ),
    "data file on disk": Seam(
        SAVING, "sidestream.sharding.checkpoint.digests:DigestedFile.close", "after"
    ),
    "index begun": Seam(
        SAVING, "sidestream.sharding.checkpoint.save:write_manifest", "before", by_first=True
    ),
    "index written": Seam(
        SAVING, "sidestream.sharding.checkpoint.save:write_manifest", "after", by_first=True
    ),
    "folder renamed": Seam(SAVING, "pathlib:Path.rename", "after", 2, by_first=True),
    "step file begun": Seam(
        SAVING, "sidestream.training.step_file:sum_of_index", "after", by_first=True
    ),
    "step file written": Seam(SAVING, "os:replace", "before", by_first=True),
    "step file renamed": Seam(SAVING, "os:replace", "after", by_first=True),
    "older one removed": Seam(SAVING, "shutil:rmtree", "before", by_first=True),
}


@dataclass(frozen=True)
class Fault:
    """What rank `rank` does at `place` in `step`, or `delay_s` later, wherever that is; `told` is a
    file that it writes the time to.
    """

    place: str
    rank: int
    step: int
    act: str
    told: str = ""
    delay_s: float = 0.0

    @property
    def where(self) -> str:
        """As the run says it."""
        phase = SEAMS[self.place].phase
        return f"{phase} step {self.step}"

    def happen(self, *args: Any) -> None:
        """Do it at a call that has `args`."""
        if self.delay_s:
            later = threading.Timer(self.delay_s, self._act, args)
            later.daemon = True
            later.start()
        else:
            self._act(*args)

    def _act(self, *args: Any) -> None:
        if self.told:
            Path(self.told).write_text(repr(time.time()))
        ACTS[self.act](*args)


def kill_oneself(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_for_long(*_: Any) -> None:
    _stop("KILL", 32)


def stop_and_go_on(*_: Any) -> None:
    _stop("CONT", 1.5)


def _stop(then: str, after_s: float) -> None:
    # Somebody else's: who is stopped does not wake by itself.
    pid = os.getpid()
    subprocess.Popen(
        ["/bin/sh", "-c", f"sleep {after_s}; kill -{then} {pid}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.kill(pid, signal.SIGSTOP)


def ask_to_stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def raise_an_error(*_: Any) -> None:
    raise RuntimeError("the fault of this test")


def exit_early(*_: Any) -> None:
    sys.exit(3)


def fill_the_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spoil_a_gradient(_: object, params: Sequence[Tensor]) -> None:
    """Of those that a unit is about to give away."""
    gradient = params[0].grad
    assert gradient is not None
    gradient.view(-1)[0] = torch.nan


ACTS: dict[str, Callable[..., None]] = {
    "kill": kill_oneself,
    "stop": stop_for_long,
    "pause": stop_and_go_on,
    "SIGTERM": ask_to_stop,
    "raise": raise_an_error,
    "exit": exit_early,
    "full disk": fill_the_disk,
    "NaN": spoil_a_gradient,
}


def arm(fault: Fault) -> None:
    """Have `fault` happen once in this process, which is its rank's, for the rest of its life."""
    seam = SEAMS[fault.place]
    doing, calls = _whereabouts(), _Countdown(seam.call)
    owner, name = _owner_of(seam.target)
    real = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        is_here = doing[0] == fault.where and calls.is_over()
        if is_here and seam.when == "before":
            fault.happen(*args)
        result = real(*args, **kwargs)
        if is_here and seam.when == "after":
            fault.happen(*args)
        return result

    setattr(owner, name, faulty)


@dataclass
class _Countdown:
    left: int

    def is_over(self) -> bool:
        self.left -= 1
        return self.left == 0


def _whereabouts() -> list[str]:
    """What this process does, at place 0, whoever made the object that says so."""
    doing = [""]
    assign = object.__setattr__

    def note(self: Whereabouts, name: str, value: object) -> None:
        if name == "doing":
            doing[0] = str(value)
        assign(self, name, value)

    Whereabouts.__setattr__ = note  # type: ignore[method-assign, assignment]
    return doing


def _owner_of(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name
