"""Tests of the host-cost bench: its summary on made-up samples, and the command at a tiny size."""

import json
import math
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from sidestream.bench.host_cost import (
    CANDIDATES,
    LIMIT_OF_RATIO,
    Samples,
    Settings,
    fake_ranks,
    format_table,
    main,
    summarise,
)
from sidestream.bench.profiling import profile_calls

VISITS = 6


def _samples(**wall: float) -> Samples:
    return Samples(
        {name: [value] * VISITS for name, value in wall.items()},
        {name: [value / 2] * VISITS for name, value in wall.items()},
    )


def test_summary_subtracts_plain_and_divides_by_fsdp2():
    summary = summarise(_samples(plain=800.0, fsdp2=2800.0, zero3=1120.0))
    ours = {key: estimate.median for key, estimate in summary["zero3"].items()}
    assert ours == pytest.approx(
        {
            "wall_us": 1120.0,
            "cpu_us": 560.0,
            "added_wall_us": 320.0,
            "added_cpu_us": 160.0,
            "wall_over_fsdp2": 0.4,
            "cpu_over_fsdp2": 0.4,
        }
    )


def test_summary_leaves_out_what_was_not_measured():
    assert set(summarise(_samples(zero3=1.0))["zero3"]) == {"wall_us", "cpu_us"}


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [pytest.param(1000.0, "met", id="below"), pytest.param(1200.0, "missed", id="above")],
)
def test_table_gives_a_verdict_on_ours_alone(ours, verdict):
    table = format_table(Settings(), summarise(_samples(plain=800.0, fsdp2=2800.0, zero3=ours)))
    verdicts = [line for line in table.splitlines() if f"at most {LIMIT_OF_RATIO}" in line]
    assert len(verdicts) == 2
    assert all(line.startswith("zero3") and line.endswith(verdict) for line in verdicts)


def test_fake_ranks_leave_no_trace():
    threads = torch.get_num_threads()
    with fake_ranks(1024):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1024)
        assert torch.get_num_threads() == 1
    assert not dist.is_initialized()
    assert torch.get_num_threads() == threads


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
def test_command_measures_every_candidate_and_writes_its_result(tmp_path):
    result = tmp_path / "host_cost.json"
    command = [sys.executable, "-m", "sidestream.bench.host_cost", "--units", "2", "--world", "4"]
    command += ["--visits", "2", "--steps", "1", "--json", str(result)]
    command += ["--candidates", ",".join(CANDIDATES)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stderr
    for name in CANDIDATES:
        assert f"\n{name} " in finished.stdout
    content = json.loads(result.read_text())
    assert content["settings"]["world"] == 4
    assert [len(values) for values in content["samples"]["wall_us"].values()] == [2] * len(
        CANDIDATES
    )
    ratio = content["summary"]["zero3"]["wall_over_fsdp2"]["median"]
    assert 0.05 < ratio < 20


@pytest.mark.timeout(240)
def test_command_profiles_one_candidate(tmp_path):
    command = [sys.executable, "-m", "sidestream.bench.host_cost", "--units", "2"]
    command += ["--visits", "1", "--steps", "2", "--profile", "zero3"]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stderr
    assert "zero3, us a unit and step" in finished.stdout
    assert "sharding/" in finished.stdout


@pytest.mark.parametrize("name", ["zero9", "ddp"])
def test_command_refuses_a_candidate_it_cannot_measure(name, capsys):
    with pytest.raises(SystemExit):
        main(["--candidates", f"plain,{name}"])
    assert f"got ['{name}']" in capsys.readouterr().err
