"""A run that asks for other hardware starts anew, with its ranks on each other's places.

    rotation       0              1              2
    2 GPUs         rank r: GPU r  GPU (r+1) % 2  as 0
    2 CPU places   rank r: cpu r  cpu (r+1) % 2  as 0

A GPU is another piece of hardware; places of a CPU are names that stand for it. One rank on a CPU
has two places, so that there is always another one; one GPU is all there is.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .exit_codes import RESUME_TO_DISAMBIGUATE
from .remarks import say

ROTATION_VARIABLE = "SIDESTREAM_ROTATION"
# In the environment of ranks whose checkpoints go with their launcher: nobody resumes from there.
TEMPORARY_VARIABLE = "SIDESTREAM_TEMPORARY_CHECKPOINTS"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MIN_CPU_PLACES = 2


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which rank takes which of `num_places` of a machine: rank r the place r + `shift`, behind the
    last the first. A rank's place is that of its device, `kind` "cpu" or "cuda".
    """

    kind: str
    num_places: int
    shift: int = 0

    def next(self) -> "Rotation | None":
        """The next one, or None where all have been tried."""
        shift = self.shift + 1
        return Rotation(self.kind, self.num_places, shift) if shift < self.num_places else None

    def place_of(self, rank: int) -> int:
        """The place that `rank` takes."""
        return (rank + self.shift) % self.num_places

    def rank_on(self, place: int) -> int:
        """Who takes `place`: a rank, or a number behind the last rank where nobody does."""
        return (place - self.shift) % self.num_places

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What ranks find in their environment: the rotation, and GPUs in another order."""
        found = {ROTATION_VARIABLE: f"{self.kind} {self.num_places} {self.shift}"}
        if self.kind == "cuda":
            visible = environ.get(VISIBLE_VARIABLE)
            gpus = visible.split(",") if visible else [str(n) for n in range(self.num_places)]
            gpus = gpus[: self.num_places]
            found[VISIBLE_VARIABLE] = ",".join(gpus[self.shift :] + gpus[: self.shift])
        return found


def rotation_of(kind: str, num_ranks: int, num_gpus: int) -> Rotation:
    """The first one, of `num_ranks` ranks on a machine that has `num_gpus`."""
    return Rotation(kind, num_gpus if kind == "cuda" else max(num_ranks, _MIN_CPU_PLACES))


def rotation_from(environ: Mapping[str, str]) -> Rotation | None:
    """The one that our launcher has put into the environment of a rank, if it has."""
    told = environ.get(ROTATION_VARIABLE)
    if told is None:
        return None
    kind, num_places, shift = told.split()
    return Rotation(kind, int(num_places), int(shift))


def relaunching(
    run: Callable[[Mapping[str, str], bool], int],
    rotation: Rotation,
    *,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Call `run(environment, is_resumed)`, which launches ranks with `environment` beside `environ`
    and returns their exit code, again on other places as long as that is 16, and return the last
    one: 16 once more where there are no other places.
    """
    is_resumed = False
    while True:
        code = run(rotation.environment(environ), is_resumed)
        following = rotation.next()
        if code != RESUME_TO_DISAMBIGUATE:
            return code
        if following is None:
            say(
                f"a rejected result has to be computed on other hardware than the "
                f"{rotation.num_places} places of this machine ({rotation.kind}); resume from the "
                "checkpoint on another machine"
            )
            return code
        rotation, is_resumed = following, True
        say(
            "a rejected result was reproduced: the ranks start again from the checkpoint, rank 0 "
            f"on {rotation.kind} {rotation.place_of(0)}"
        )
