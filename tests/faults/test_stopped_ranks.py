"""A rank that is stopped by SIGSTOP: the others name it and end, or it goes on in time and nothing
was.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.tests.faults.runs import LIMIT_S, complete_steps, job, run, saving
from sidestream.tests.faults.seams import Fault
from sidestream.training.launch import heartbeat

PLACES = ["gradient exchange", "data file begun"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_stopped_rank_is_named_within_half_a_minute(
    place: str, rank: int, text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    saved, fault = tmp_path / "saved", Fault(place, rank, 3, "stop", str(tmp_path / "told"))
    options = [*job(), *text]
    stopped = run([*options, *saving(saved)], 2, tmp_path, fault, beat_s=heartbeat.BEAT_S)
    assert stopped.error_s is not None and stopped.error_s < LIMIT_S, stopped
    said = stopped.said[1 - rank]
    assert f"rank {rank} has not been heard of for" in said, said
    assert f"rank {1 - rank} failed {fault.where}" in said, said
    assert complete_steps(saved)[-1] == 2
    resumed = run([*options, *saving(saved, resume=True)], 2, tmp_path)
    assert resumed.result["params_sha256"] == unbroken()
    print(f"\nrank {rank} stopped, {place}: named, and the run over, after {stopped.error_s:.1f} s")


@pytest.mark.parametrize(
    "place", [pytest.param(PLACES[0], marks=pytest.mark.slow), PLACES[1]], ids=PLACES
)
def test_a_rank_that_is_continued_in_time_changes_no_bit(
    place: str, text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    fault = Fault(place, 1, 3, "pause", str(tmp_path / "told"))
    paused = run([*job(), *text, *saving(tmp_path / "saved")], 2, tmp_path, fault)
    assert (tmp_path / "told").exists(), "it was stopped"
    assert paused.result["params_sha256"] == unbroken(), paused
