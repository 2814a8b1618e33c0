"""Ranks that end with a code they agree on, and their start on each other's places."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from sidestream.training.launch.launcher import launch
from sidestream.training.launch.relaunching import (
    Rotation,
    relaunching,
    rotation_from,
    rotation_of,
)
from sidestream.training.rerun import fault_here, hardware_name
from sidestream.training.rerun.injection import Moment

PLACES = {
    "1 rank on a cpu": (rotation_of("cpu", 1, 0), [[0], [1]]),
    "3 ranks on a cpu": (rotation_of("cpu", 3, 0), [[0, 1, 2], [1, 2, 0], [2, 0, 1]]),
    "1 rank on a gpu": (rotation_of("cuda", 1, 1), [[0]]),
    "2 ranks on 4 gpus": (rotation_of("cuda", 2, 4), [[0, 1], [1, 2], [2, 3], [3, 0]]),
}


def all_rotations(rotation: Rotation | None) -> list[Rotation]:
    return [] if rotation is None else [rotation, *all_rotations(rotation.next())]


@pytest.mark.parametrize("first, places", PLACES.values(), ids=PLACES)
def test_each_rank_takes_each_place_once(first: Rotation, places: list[list[int]]) -> None:
    rotations = all_rotations(first)
    assert [[one.place_of(r) for r in range(len(places[0]))] for one in rotations] == places
    for one in rotations:
        assert [one.rank_on(one.place_of(rank)) for rank in range(4)][: first.num_places] == [
            *range(first.num_places)
        ][:4]
        assert rotation_from(one.environment({})) == one
    assert rotation_from({}) is None


@pytest.mark.parametrize(
    "visible, expected",
    [(None, "1,2,0"), ("4,2,7", "2,7,4"), ("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c,GPU-a")],
    ids=["all", "numbers", "uuids"],
)
def test_gpus_are_seen_in_another_order(visible: str | None, expected: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Rotation("cuda", 3, 1).environment(environ)["CUDA_VISIBLE_DEVICES"] == expected
    assert "CUDA_VISIBLE_DEVICES" not in Rotation("cpu", 3, 1).environment(environ)


def test_places_of_a_cpu_are_names_of_hardware() -> None:
    host = socket.gethostname()
    assert hardware_name({"LOCAL_RANK": "1"}) == f"{host} cpu 1"
    environ = {"LOCAL_RANK": "1", **Rotation("cpu", 2, 1).environment({})}
    assert hardware_name(environ) == f"{host} cpu 0"


def test_a_persistent_fault_stays_where_it_was() -> None:
    for shift, rank in enumerate([1, 0, 2]):
        environ = Rotation("cpu", 3, shift).environment({})
        hit = {kind: fault_here(kind, 5, 1, environ) for kind in ("transient", "persistent", "bug")}
        at = {
            kind: [r for r in range(3) if fault.is_wrong(Moment(5, r, 0, "", is_first=True))]
            for kind, fault in hit.items()
        }
        assert at == {"transient": [1], "persistent": [rank], "bug": [1]}


@pytest.mark.parametrize(
    "codes, calls",
    [([0], 1), ([17], 1), ([1], 1), ([16, 17], 2), ([16, 16, 17], 3), ([16, 16, 16], 3)],
    ids=str,
)
def test_ranks_start_again_as_long_as_they_ask_for_it(
    codes: list[int], calls: int, capfd: Any
) -> None:
    seen: list[Any] = []

    def run(environment: Any, is_resumed: bool) -> int:
        seen.append((rotation_from(environment), is_resumed))
        return codes[len(seen) - 1]

    assert relaunching(run, rotation_of("cpu", 3, 0), environ={}) == codes[-1]
    assert seen == [(Rotation("cpu", 3, shift), shift > 0) for shift in range(calls)]
    told = capfd.readouterr().err
    assert ("resume from the checkpoint on another machine" in told) == (codes[-1] == 16)
    assert told.count("start again from the checkpoint") == calls - 1


def program(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\nrank = int(os.environ['RANK'])\n{code}"]


@pytest.mark.parametrize("code", [16, 17])
def test_a_code_that_all_agree_on_is_no_failure(code: int, capfd: Any) -> None:
    assert launch(program(f"time.sleep(0.3 * rank); sys.exit({code})"), 2) == code
    assert capfd.readouterr().err == ""


def test_a_failure_counts_more_than_a_code_that_was_agreed_on(capfd: Any) -> None:
    assert launch(program("time.sleep(0.2 * rank); sys.exit(16 if rank == 0 else 3)"), 2) == 3
    assert "rank 1 exited with code 3" in capfd.readouterr().err


def test_the_launcher_tells_ranks_their_places(tmp_path: Path) -> None:
    told = f"open(r'{tmp_path}/' + os.environ['SIDESTREAM_ROTATION'] + f' {{rank}}', 'w')\n"
    command = program(f"{told}sys.exit(16 if os.environ['SIDESTREAM_ROTATION'][-1] == '0' else 17)")
    rotation = rotation_of("cpu", 2, 0)
    code = relaunching(lambda environment, _: launch(command, 2, environment=environment), rotation)
    assert code == 17
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cpu 2 0 0", "cpu 2 0 1", "cpu 2 1 0", "cpu 2 1 1")
    }
