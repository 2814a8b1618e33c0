"""Tests of the step-time bench: checks and report on made-up runs, the command at a tiny size."""

import json
import math
import subprocess
import sys

import pytest
import torch

from sidestream.bench.step_time import Launch, describe_all, describe_launch, main, pool
from sidestream.bench.step_worker import check_agreement, compare_parameters


def _launch(ratios: list[float], **changes) -> Launch:
    seen = {
        "candidate_seconds": ratios,
        "rival_seconds": [1.0] * len(ratios),
        "candidate_wire_bytes": 300_000_000,
        "rival_wire_bytes": None,
        "relative_difference": 0.0,
        "share_of_unequal_elements": 0.0,
        "losses_equal": True,
    }
    return Launch(**{**seen, **changes})


def test_difference_of_parameters_is_relative_to_their_norm():
    first = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    second = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([[4.0]])}
    assert compare_parameters(first, first) == (0.0, 0.0)
    assert compare_parameters(first, second) == pytest.approx((0.1, 1 / 3))


@pytest.mark.parametrize(
    "second",
    [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}, {}],
    ids=["other-shape", "other-name", "missing"],
)
def test_other_parameters_are_refused(second):
    with pytest.raises(ValueError, match="same parameters"):
        compare_parameters({"a": torch.zeros(2)}, second)


def test_agreement_within_rounding_passes():
    check_agreement({"ours": [1.0, 2.0], "ddp": [1.0, 2.0 + 1e-5]}, 1e-6)


@pytest.mark.parametrize(
    ("losses", "difference"),
    [
        pytest.param([1.0, 2.1], 0.0, id="loss"),
        pytest.param([1.0, math.nan], 0.0, id="nan-loss"),
        pytest.param([1.0, 2.0], 0.01, id="weights"),
        pytest.param([1.0, 2.0], math.nan, id="nan-weights"),
    ],
)
def test_disagreement_is_an_error(losses, difference):
    with pytest.raises(RuntimeError, match="ours and ddp did not train alike"):
        check_agreement({"ours": losses, "ddp": [1.0, 2.0]}, difference)


def test_pool_takes_every_launch():
    pooled = pool([_launch([0.8] * 5), _launch([0.9] * 5), _launch([1.0] * 5)])
    assert (pooled.median, pooled.low, pooled.high, pooled.num_samples) == (0.9, 0.8, 1.0, 15)


@pytest.mark.parametrize(
    ("names", "ratio", "expected"),
    [
        pytest.param(("zero3", "fsdp2"), 0.85, "at most 0.9: met", id="met"),
        pytest.param(("zero3", "fsdp2"), 0.93, "at most 0.9: missed", id="missed"),
        pytest.param(("zero0", "ddp"), 1.02, "at most 1.05: met", id="ddp"),
    ],
)
def test_limits_of_the_project_get_a_verdict(names, ratio, expected):
    assert expected in describe_all(names, [_launch([ratio] * 4)])


def test_what_the_method_cannot_tell_apart_is_said():
    assert "does not tell apart" in describe_all(("zero3", "ddp"), [_launch([1.03] * 4)])
    assert "does not tell apart" not in describe_all(("zero3", "ddp"), [_launch([1.06] * 4)])


def test_description_of_a_launch_tells_traffic_and_agreement():
    assert "wire not counted, weights equal bits, losses equal" in describe_launch(
        1, _launch([0.8])
    )
    other = _launch(
        [0.8],
        rival_wire_bytes=400_000_000,
        share_of_unequal_elements=0.34,
        relative_difference=1e-6,
        losses_equal=False,
    )
    assert "300.0 / 400.0 MB, weights 34.0% unequal, 1.0e-06 of norm" in describe_launch(1, other)


def _run(folder, *options: str) -> str:
    command = [sys.executable, "-m", "sidestream.bench.step_time", "--tiny", *options]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=folder
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.timeout(240)
def test_command_compares_and_writes_its_result(tmp_path):
    result = tmp_path / "step_time.json"
    options = ["--pairs", "3", "--launches", "1", "--against", "ddp,fsdp2_tuned"]
    printed = _run(tmp_path, *options, "--json", str(result))
    assert "zero0 against ddp" in printed
    assert "zero3 against fsdp2_tuned" in printed
    assert printed.count("weights equal bits, losses equal") == 2
    comparisons = json.loads(result.read_text())["comparisons"]
    assert [each["limit"] for each in comparisons] == [1.05, 1.0]
    for comparison in comparisons:
        assert len(comparison["launches"][0]["candidate_seconds"]) == 3


@pytest.mark.timeout(240)
@pytest.mark.parametrize("profile", ["python", "operators"])
def test_command_times_and_profiles_one_trainer(tmp_path, profile):
    printed = _run(tmp_path, "--trainer-only", "zero3", "--steps", "2", "--profile", profile)
    assert "zero3: median" in printed
    assert "MiB at start" in printed
    assert {"python": "by own time", "operators": "Self CPU"}[profile] in printed


@pytest.mark.timeout(240)
def test_ranks_that_do_not_communicate_are_caught(tmp_path):
    with pytest.raises(AssertionError, match="did not train alike"):
        _run(
            tmp_path, "--pairs", "3", "--launches", "1", "--candidate", "plain", "--against", "ddp"
        )


def test_unknown_rival_is_refused():
    with pytest.raises(SystemExit):
        main(["--against", "ddp,horovod"])
