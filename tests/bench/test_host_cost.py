"""Tests of the host-cost bench: its summary on made-up samples, and the command at a tiny size."""

import json
import math
import threading

import pytest
import torch
import torch.distributed as dist

from sidestream.bench import host_cost
from sidestream.bench.commands import host
from sidestream.bench.commands.host import CANDIDATES
from sidestream.bench.host_cost import Case, Samples, fake_ranks, growth, summarise
from sidestream.bench.profiling import profile_calls
from sidestream.cli import main
from sidestream.sharding.collectives import start_all_gather

VISITS = 6


def _samples(**cpu_us: float) -> dict[Case, Samples]:
    """`fsdp2_8=2800.0`: 10 units of FSDP2 at world 8."""
    found = {}
    for name, value in cpu_us.items():
        candidate, _, world = name.partition("_")
        case = Case(10, int(world or 0), candidate)
        found[case] = Samples([value] * VISITS, [2 * value] * VISITS)
    return found


def test_summary_compares_with_plain_and_fsdp2_of_the_same_world():
    samples = _samples(
        plain=800.0, fsdp2_8=2800.0, fsdp2_64=4800.0, zero3_8=1120.0, zero3_64=1200.0
    )
    summary = summarise(samples)
    near, far = summary[Case(10, 8, "zero3")], summary[Case(10, 64, "zero3")]
    assert (near.cpu_us.median, near.wall_us.median) == (1120.0, 2240.0)
    assert near.ratio_to_fsdp2.median == pytest.approx(0.4)
    assert near.added_share.median == pytest.approx(0.16)
    assert far.ratio_to_fsdp2.median == pytest.approx(0.25)
    assert far.added_share.median == pytest.approx(0.1)
    grown = growth(samples, Case(10, 8, "zero3"), Case(10, 64, "zero3"))
    assert grown.median == pytest.approx(1200 / 1120)


def test_summary_leaves_out_what_was_not_measured():
    row = summarise(_samples(zero3_8=1.0))[Case(10, 8, "zero3")]
    assert row.ratio_to_fsdp2 is row.added_share is None


@pytest.mark.parametrize(
    ("ours", "ratio", "share"), [(1000.0, "met", "met"), (1200.0, "missed", "met")]
)
def test_verdicts_are_on_ours_alone(ours, ratio, share):
    samples = _samples(plain=800.0, fsdp2_8=2800.0, ddp_8=2700.0, zero3_8=ours)
    lines = list(host.verdicts(samples, summarise(samples)))
    assert len(lines) == 2
    assert all(line.startswith("zero3, 10 units, world 8: ") for line in lines)
    assert lines[0].endswith(f"at most {host.LIMIT_OF_RATIO}: {ratio}")
    assert lines[1].endswith(f"at most {host.LIMIT_OF_ADDED_SHARE}: {share}")


def test_growth_with_the_world_is_judged_for_ours_and_shown_for_fsdp2():
    samples = _samples(fsdp2_8=2.0, fsdp2_64=4.0, zero3_8=1.0, zero3_64=1.1, ddp_8=1.0, ddp_64=1.0)
    lines = [line for line in host.verdicts(samples, summarise(samples)) if " 64 over 8" in line]
    assert [line.split(":")[0] for line in lines] == ["fsdp2", "zero3"]
    assert lines[0].endswith("2.000 [2.000, 2.000]")
    assert lines[1].endswith(f"at most {host.LIMIT_OF_GROWTH}: missed")


def test_fake_ranks_leave_no_trace():
    threads, gather = torch.get_num_threads(), dist.ProcessGroup._allgather_base
    with fake_ranks(1024):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1024)
        assert torch.get_num_threads() == 1
        output = torch.full((1024, 3), 7.0)
        start_all_gather(dist.group.WORLD, output, torch.zeros(3), "a gather").wait()
        assert output.eq(7.0).all(), "an all-gather copied something"
    assert not dist.is_initialized()
    assert torch.get_num_threads() == threads
    assert dist.ProcessGroup._allgather_base is gather


def test_profile_divides_by_calls_and_units():
    def work() -> None:
        for _ in range(6):
            math.gcd(12, 18)

    profile = profile_calls(work, 5, units=3)
    costs = {cost.name.split()[-1].rstrip(">"): cost for cost in profile.functions}
    assert costs["work"].calls == pytest.approx(1 / 3)
    assert costs["math.gcd"].calls == pytest.approx(2.0)
    assert costs["work"].total_us >= costs["work"].own_us > 0
    assert "test_host_cost.py" in profile.describe(top=3)


def test_profile_tells_time_of_other_threads_apart():
    def spin(count: int) -> int:
        return sum(range(count))

    def with_company() -> None:
        company = threading.Thread(target=spin, args=(400_000,))
        company.start()
        company.join()

    alone = profile_calls(lambda: spin(400_000), 10)
    assert alone.other_threads_us <= 0.5 * alone.this_thread_us
    accompanied = profile_calls(with_company, 10)
    assert accompanied.other_threads_us > accompanied.this_thread_us


@pytest.mark.timeout(240)
def test_command_measures_every_candidate_and_writes_its_result(tmp_path, capsys):
    result = tmp_path / "host.json"
    command = ["bench", "host", "--units", "2", "--world", "4,8", "--visits", "2"]
    assert main([*command, "--json", str(result), "--candidates", ",".join(CANDIDATES)]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in CANDIDATES)
    content = json.loads(result.read_text())
    rows = {(row["candidate"], row["world"]): row for row in content["rows"]}
    assert len(rows) == 2 * len(CANDIDATES) - 1  # the plain model has no ranks
    assert all(len(row["samples"]["cpu_us"]) == 2 for row in rows.values())
    assert rows["fsdp2", 4]["ratio_to_fsdp2"] == 1.0
    assert 0.05 < rows["zero3", 8]["ratio_to_fsdp2"] < 20


@pytest.mark.timeout(240)
def test_command_profiles_one_candidate(capsys):
    assert main(["bench", "host", "--units", "2", "--world", "4", "--profile", "zero3"]) == 0
    printed = capsys.readouterr().out
    assert "zero3, 2 units, world 4; us a unit and step" in printed
    assert "sharding/" in printed


def test_command_refuses_an_unwritable_file_before_it_measures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host_cost, "measure", lambda *_: pytest.fail("measured all the same"))
    assert main(["bench", "host", "--json", str(tmp_path / "nowhere" / "host.json")]) == 2
    assert "--json" in capsys.readouterr().err
