"""Tests of `sidestream bench step`: checks and report on made-up launches, the command at a tiny
size.
"""

import json
import math

import pytest
import torch

from sidestream.bench import ranks, step_time
from sidestream.bench.commands import step
from sidestream.bench.models import STEP_TIME_CONFIG, TINY_CONFIG
from sidestream.bench.step_time import LIMITS, Launch, Plan, Row, Seen, summarise
from sidestream.bench.step_worker import (
    PairOutcome,
    SoloOutcome,
    Task,
    check_agreement,
    compare_parameters,
)
from sidestream.cli import main

PLAN = Plan(task=Task(config=STEP_TIME_CONFIG), world=2, pairs=4, launches=1)


def _launch(ratios: list[float], **changes) -> Launch:
    seen = {
        "candidate": Seen(seconds=ratios, wire_bytes=300_000_000, loss=5.5),
        "rival": Seen(seconds=[1.0] * len(ratios), wire_bytes=400_000_000, loss=5.5),
        "steps": 31,
        "relative_difference": 0.0,
        "share_of_unequal_elements": 0.0,
    }
    return Launch(**{**seen, **changes})


def _row(names: tuple[str, str], *launches: Launch, plan: Plan = PLAN, peaks=(500.0, 600.0)) -> Row:
    return summarise(names, plan, list(launches), dict(zip(names, peaks, strict=True)))


def test_difference_of_parameters_is_relative_to_their_norm():
    first = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    second = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([[4.0]])}
    assert compare_parameters(first, first) == (0.0, 0.0)
    assert compare_parameters(first, second) == pytest.approx((0.1, 1 / 3))

    for other in ({"a": first["b"], "b": first["b"]}, {"a": first["a"]}):
        with pytest.raises(ValueError, match="same parameters"):
            compare_parameters(first, other)


def test_agreement_within_rounding_passes():
    check_agreement({"ours": [1.0, 2.0], "ddp": [1.0, 2.0 + 1e-5]}, 1e-6)
    check_agreement({"ours": [1.0, 2.0], "ddp": [1.0, 2.05]}, 5e-3, torch.bfloat16)


@pytest.mark.parametrize(
    ("losses", "difference"),
    [([1.0, 2.2], 0.0), ([1.0, math.nan], 0.0), ([1.0, 2.0], 0.05), ([1.0, 2.0], math.nan)],
    ids=["loss", "nan-loss", "weights", "nan-weights"],
)
def test_disagreement_is_an_error(losses, difference):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="ours and ddp did not train alike"):
            check_agreement({"ours": losses, "ddp": [1.0, 2.0]}, difference, dtype)


def test_row_takes_every_launch():
    row = _row(
        ("zero3", "fsdp2"),
        _launch([0.8] * 5),
        _launch([0.9] * 5, relative_difference=1e-6, share_of_unequal_elements=0.34),
        _launch([1.0] * 5, rival=Seen(seconds=[1.0] * 5, wire_bytes=None, loss=5.5)),
    )
    assert (row.ratio.median, row.ratio.low, row.ratio.high) == (0.9, 0.8, 1.0)
    assert (row.relative_difference, row.share_of_unequal_elements) == (1e-6, 0.34)
    ours, theirs = row.candidate_figures, row.rival_figures
    assert (ours.ms, ours.peak_mib, theirs.ms, theirs.peak_mib) == (900.0, 500.0, 1000.0, 600.0)
    # Two ranks with four sequences of 128 each.
    assert theirs.tokens_per_s == 2 * 4 * 128
    assert (ours.wire_bytes, theirs.wire_bytes) == (300_000_000, 400_000_000)


@pytest.mark.parametrize(
    ("names", "ratio", "peaks", "expected"),
    [
        pytest.param(("zero3", "fsdp2"), 0.85, (1, 1), ["time at most 0.85: met"], id="met"),
        pytest.param(("zero3", "fsdp2"), 0.86, (1, 1), ["time at most 0.85: missed"], id="missed"),
        pytest.param(
            ("zero3", "fsdp2_tuned"),
            0.9,
            (2.5, 2),
            ["time at most 0.95: met", "no more memory: missed (2.5 / 2.0 MiB)"],
            id="tuned-memory",
        ),
        pytest.param(("zero2", "fsdp2"), 0.7, (1, 1), [], id="no-limit"),
        pytest.param(
            ("zero0", "ddp"),
            1.02,
            (1, 1),
            ["time at most 1.00: missed", "closer to 1 than 5%, which this method does not"],
            id="close",
        ),
    ],
)
def test_verdicts_are_on_the_limits_of_the_project(names, ratio, peaks, expected):
    found = _row(names, _launch([ratio] * 4), peaks=peaks).verdicts()
    assert len(found) == len(expected)
    for line, part in zip(found, expected, strict=True):
        assert line.startswith(f"{names[0]} / {names[1]}: {part}")


@pytest.mark.parametrize(("device_type", "world"), [("cuda", 2), ("cpu", 1)])
def test_limits_are_those_of_several_gloo_ranks(device_type, world):
    task = Task(config=STEP_TIME_CONFIG, device_type=device_type)
    plan = Plan(task=task, world=world, pairs=4, launches=1)
    assert _row(("zero3", "fsdp2"), _launch([0.5] * 4), plan=plan).verdicts() == []


def test_table_shows_both_of_a_comparison_and_how_they_agree():
    other = Seen(seconds=[1.0] * 4, wire_bytes=None, loss=5.25)
    launch = _launch(
        [0.75] * 4, rival=other, share_of_unequal_elements=0.34, relative_difference=1e-6
    )
    lines = list(
        step.format_table([_row(("zero0", "ddp"), launch), _row(("a", "b"), _launch([1.0]))])
    )
    assert "loss after 31" in lines[1]
    for cell in ("zero0 ", " ddp ", "750.0 / 1000.0", "1365 / 1024", "0.750 [0.750, 0.750]"):
        assert cell in lines[2]
    for cell in ("500.0 / 600.0", "300.0 / -", "5.5000 / 5.2500", "34.0% unequal, 1.0e-06 of norm"):
        assert cell in lines[2]
    assert lines[3].endswith("equal bits")


def test_slowest_rank_and_largest_peak_count(monkeypatch):
    def outcome(rank: int, case: object):
        if isinstance(case, step_time.SoloCase):
            return SoloOutcome(
                seconds=[], wire_bytes=None, start_mib=90.0, peak_mib=100.0 + rank, profile=None
            )
        return PairOutcome(
            seconds={"zero3": [1.0 + rank, 4.0 - rank], "fsdp2": [8.0, 8.0]},
            losses={"zero3": [9.0, 1.0 + rank], "fsdp2": [9.0, 3.0]},
            wire_bytes={"zero3": 7, "fsdp2": None},
            relative_difference=0.25 * rank,
            share_of_unequal_elements=0.5 * rank,
        )

    def run_ranks(work, world, case, *, device_type):
        assert device_type == "cpu"
        return [outcome(rank, case) for rank in range(world)]

    monkeypatch.setattr(step_time, "run_ranks", run_ranks)
    told: list[str] = []
    plan = Plan(task=Task(config=TINY_CONFIG), world=2, pairs=2, launches=2)
    (row,) = step_time.compare([("zero3", "fsdp2")], plan, told.append)
    assert [one.candidate for one in row.launches] == [
        Seen(seconds=[2.0, 4.0], wire_bytes=7, loss=1.5)
    ] * 2
    assert (row.steps, row.relative_difference, row.share_of_unequal_elements) == (2, 0.25, 0.5)
    assert row.candidate_figures.peak_mib == row.rival_figures.peak_mib == 11.0
    assert len(told) == 5  # the comparison, two launches, each alone


def _options(*arguments: str):
    """What the command would do, and does not."""
    chosen = {}

    def compare(comparisons, plan, tell):
        chosen.update(comparisons=comparisons, plan=plan)
        raise ranks.RanksFailed("stopped here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "compare", compare)
        assert main(["bench", "step", *arguments]) == 1
    return chosen["comparisons"], chosen["plan"]


def test_rivals_have_a_level_of_ours_each():
    comparisons, plan = _options("--device", "cpu")
    assert comparisons == [
        ("zero0", "ddp"),
        ("zero1", "ddp_zero1"),
        ("zero3", "fsdp2"),
        ("zero3", "fsdp2_tuned"),
    ]
    assert set(LIMITS) == {*comparisons, ("buckets", "ddp")}
    assert (plan.world, plan.pairs, plan.launches) == (2, 25, 3)
    assert plan.task == Task(config=STEP_TIME_CONFIG)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--zero", "1", "--against", "ddp,fsdp2"], [("zero1", "ddp"), ("zero1", "fsdp2")]),
        (["--against", "zero2"], [("zero3", "zero2")]),
        (["--dtype", "bf16"], [("zero3", "fsdp2"), ("zero3", "fsdp2_tuned")]),
        (
            ["--candidate", "fsdp2"],
            [("fsdp2", "ddp"), ("fsdp2", "ddp_zero1"), ("fsdp2", "fsdp2_tuned")],
        ),
    ],
    ids=["zero", "ours-against-ours", "bf16", "one-of-the-usual"],
)
def test_options_choose_who_is_compared(arguments, expected):
    assert _options("--device", "cpu", *arguments)[0] == expected


def test_gpus_get_a_rank_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks.choose_ranks("auto", None) == ("cuda", 4)
    assert ranks.choose_ranks("cuda", 1) == ("cuda", 1)
    assert ranks.choose_ranks("cpu", 6) == ("cpu", 6)
    assert ranks.device_of(3, "cuda") == torch.device("cuda", 3)
    comparisons, plan = _options("--world", "1")
    assert ("zero3", "fsdp2") in comparisons
    assert "fsdp2_tuned" not in dict(map(reversed, comparisons))
    assert (plan.world, plan.task.device_type) == (1, "cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "3"], "--world: expected at most 2, a GPU for each rank, got 3"),
        (["--against", "fsdp2_tuned"], "fsdp2_tuned: expected cpu"),
        (["--against", "ddp", "--dtype", "bf16"], "ddp: expected torch.float32"),
        (["--against", "fsdp2", "--candidate", "fsdp2"], "got fsdp2 for both"),
        (["--candidate", "fsdp2", "--dtype", "bf16"], "--against: expected a trainer to compare"),
        (["--against", "ddp", "--json", "nowhere/step.json"], "--json"),
        (["--profile", "python"], "--profile: expected --trainer-only"),
        (["--trainer-only", "ddp", "--json", "step.json"], "--json: expected a comparison"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_rank_starts(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(step_time, "run_ranks", lambda *_, **__: pytest.fail("ranks started"))
    assert main(["bench", "step", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "step", "--device", "cuda"]) == 2
    assert "--device: expected a GPU that torch sees" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_command_compares_and_writes_its_result(tmp_path, capsys):
    """One rank, so that fewer processes start; two are in the test of those that disagree."""
    result = tmp_path / "step.json"
    command = ["bench", "step", "--tiny", "--device", "cpu", "--pairs", "3", "--launches", "1"]
    assert main([*command, "--world", "1", "--against", "ddp", "--json", str(result)]) == 0
    printed = capsys.readouterr().out
    assert "zero0 against ddp" in printed
    assert "equal bits" in printed
    content = json.loads(result.read_text())
    assert (content["schema_version"], content["kind"]) == (1, "step")
    assert content["command"].startswith("sidestream bench step --tiny --device cpu")
    assert content["machine"]["torch"] == torch.__version__
    assert content["settings"]["world"] == 1
    (row,) = content["rows"]
    assert (row["candidate"], row["rival"]) == ("zero0", "ddp")
    assert (row["limit"], row["steps"]) == (None, 9)
    assert len(row["launches"][0]["candidate"]["seconds"]) == 3
    assert row["candidate_figures"]["loss"] == row["rival_figures"]["loss"] > 0
    assert row["share_of_unequal_elements"] == 0.0
    assert row["rival_figures"]["peak_mib"] >= 0


@pytest.mark.timeout(400)
def test_command_times_and_profiles_one_trainer(capsys):
    command = ["bench", "step", "--tiny", "--device", "cpu", "--world", "1", "--steps", "2"]
    assert main([*command, "--trainer-only", "zero3", "--profile", "operators"]) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("zero3: median", "MiB at start", "Self CPU"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_do_not_communicate_are_caught(capsys):
    command = ["bench", "step", "--tiny", "--device", "cpu", "--pairs", "3", "--launches", "1"]
    assert main([*command, "--candidate", "plain", "--against", "ddp"]) == 1
    assert "plain and ddp did not train alike" in capsys.readouterr().err
