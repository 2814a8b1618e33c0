"""A rank that fails by itself: on a full disk, by an exception, by sys.exit. All ranks end soon and
say why, and what was saved before stays whole.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.tests.faults.runs import LIMIT_S, complete_steps, job, run, saving
from sidestream.tests.faults.seams import SEAMS, Fault

WRITES = ["data file begun", "data file half written", "index begun", "step file written"]
TOLD = {
    "raise": "RuntimeError.*the fault of this test",
    "full disk": "No space left on device",
    "exit": "SystemExit: 3",
}
CASES = [
    *(("full disk", place) for place in WRITES),
    *((act, place) for act in ("raise", "exit") for place in ("forward", "data file begun")),
]


@pytest.mark.parametrize(
    ("act", "place"),
    [
        pytest.param(
            *case, marks=[] if case == CASES[0] else [pytest.mark.slow], id=", ".join(case)
        )
        for case in CASES
    ],
)
def test_what_ends_one_rank_is_told_and_saves_nothing_half(
    act: str, place: str, text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    rank = 0 if SEAMS[place].by_first else 1
    saved, fault = tmp_path / "saved", Fault(place, rank, 4, act, str(tmp_path / "told"))
    failed = run([*job(), *text, *saving(saved)], 2, tmp_path, fault)
    assert failed.error_s is not None and failed.error_s < LIMIT_S, failed
    for other in (0, 1):
        assert f"rank {other} failed {fault.where}" in failed.said[other], failed.said[other]
    assert re.search(TOLD[act], failed.said[rank]), failed.said[rank]
    assert f"rank {rank}" in failed.said[1 - rank], failed.said[1 - rank]
    assert complete_steps(saved)[-1] == 3
    resumed = run([*job(), *text, *saving(saved, resume=True)], 2, tmp_path)
    assert resumed.result["params_sha256"] == unbroken()
