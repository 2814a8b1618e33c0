"""Ranks that are killed by SIGKILL in the middle of anything: the others say so soon, all that is
saved is whole, and the resumed run ends with the bits of one that nobody killed.

`pytest tests/faults/test_kills.py -m "" -s` kills 20 and prints what became of each.
"""

import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidestream.tests.faults.runs import (
    LIMIT_S,
    STEPS,
    Outcome,
    complete_steps,
    job,
    run,
    saving,
)
from sidestream.tests.faults.seams import SEAMS, Fault

KILLS = 20
LATER_S = 0.05


@dataclass(frozen=True)
class Kill:
    """A rank of so many dies at `place` of `step`, or up to `LATER_S` after it."""

    place: str
    rank: int
    step: int
    world_size: int
    zero: int
    delay_s: float = 0.0


def kills(count: int) -> list[Kill]:
    """Every place once, in a random order, then moments after a save has begun: always the same."""
    chance = random.Random(19)
    places = random.Random(19).sample(list(SEAMS), len(SEAMS))
    found = []
    for number in range(count):
        is_placed = number < len(places)
        place = places[number] if is_placed else "data file begun"
        world_size = chance.choice((2, 3))
        found.append(
            Kill(
                place=place,
                rank=0 if SEAMS[place].by_first else chance.randrange(world_size),
                step=chance.randint(2, STEPS - 1),
                world_size=world_size,
                zero=max(number % 4, SEAMS[place].min_zero),
                delay_s=0.0 if is_placed else chance.uniform(0, LATER_S),
            )
        )
    return found


def require_told(outcome: Outcome, fault: Fault, world_size: int) -> None:
    """Every other rank says where it failed, and one of them which rank was the first and where
    that stood, within the limit.
    """
    assert outcome.error_s is not None and outcome.error_s < LIMIT_S, outcome
    for rank in set(range(world_size)) - {fault.rank}:
        assert f"rank {rank} failed {fault.where}: " in outcome.said[rank], outcome.said[rank]
    named = rf"rank {fault.rank} was last heard of (in|saving) step \d"
    assert re.search(named, outcome.all_said), outcome.all_said
    assert "RESULT" not in outcome.all_said and not outcome.result


def kill_and_resume(kill: Kill, text: Sequence[str], folder: Path, sha256: str) -> Outcome:
    """Do so, and check all of it."""
    fault = Fault(
        kill.place, kill.rank, kill.step, "kill", str(folder / "told"), delay_s=kill.delay_s
    )
    saved, options = folder / "saved", [*job(kill.zero), *text]
    broken = run([*options, *saving(saved)], kill.world_size, folder, fault)
    assert "SIGKILL" in str(broken.ends[kill.rank]), broken
    if not kill.delay_s:
        require_told(broken, fault, kill.world_size)
    steps = complete_steps(saved)
    assert steps and steps[-1] in (kill.step - 1, kill.step, kill.step + 1), steps

    resumed = run([*options, *saving(saved, resume=True)], kill.world_size, folder)
    assert set(resumed.ends.values()) == {0}, resumed
    assert resumed.result["params_sha256"] == sha256, kill
    assert resumed.result["first_step"] == steps[-1] + 1
    assert complete_steps(saved) == [STEPS - 1, STEPS]
    assert len(list(saved.iterdir())) == 4, "nothing else is left"
    return broken


@pytest.mark.parametrize("place", ["gradient exchange", "folder renamed"])
def test_a_killed_rank_is_told_and_the_run_resumes_to_the_same_bits(
    place: str, text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    kill = Kill(place, rank=0, step=3, world_size=2, zero=3)
    kill_and_resume(kill, text, tmp_path, unbroken())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_kills_end_in_the_same_bits(
    text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    print(f"\n{'place':24} {'rank':>9} step ZeRO  error after")
    times_s = []
    for number, kill in enumerate(kills(KILLS)):
        sha256 = unbroken(kill.world_size, kill.zero)
        broken = kill_and_resume(kill, text, tmp_path / f"{number}", sha256)
        who, error_s = f"{kill.rank} of {kill.world_size}", broken.error_s
        told = "" if error_s is None else f"{error_s:.2f} s"
        times_s += [] if error_s is None else [error_s]
        print(f"{kill.place:24} {who:>9} {kill.step:4} {kill.zero:4}  {told:>8}  same bits")
    print(
        f"{KILLS} of {KILLS} kills resumed to the same bits; the others' errors came after "
        f"{statistics.median(times_s):.2f} s (median), {max(times_s):.2f} s (largest)"
    )
    assert max(times_s) < LIMIT_S
