"""`sidestream bench network`: refusals, made-up figures as a table, real namespaces for root."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from sidestream.bench import network_namespaces
from sidestream.bench.models import TINY_CONFIG
from sidestream.bench.network_namespaces import (
    NetworkFailed,
    enter,
    existing,
    missing_capabilities,
    network,
    require_network,
    this_process,
)
from sidestream.bench.network_plan import plan_network
from sidestream.bench.network_table import format_result, summarise
from sidestream.bench.network_worker import NetworkCase, RankSeen, TrainerSeen
from sidestream.bench.ranks import RanksFailed, run_ranks
from sidestream.cli import main
from sidestream.tests.bench import rank_work
from sidestream.training.errors import UsageError


def _why_not() -> str:
    try:
        require_network()
    except UsageError as refusal:
        return str(refusal)
    return ""


needs_namespaces = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "can be made")


@pytest.fixture
def no_commands(monkeypatch):
    def refuse(*command, **options):
        raise AssertionError(f"{command} must not be run")

    monkeypatch.setattr(network_namespaces.subprocess, "run", refuse)


@pytest.mark.parametrize(
    ("user", "path", "message"),
    [
        (1000, None, "expected root, which may make network namespaces, got user 1000; run it"),
        (0, "", "got no ip and no tc; install iproute2"),
    ],
    ids=["no-root", "no-iproute2"],
)
def test_what_is_missing_is_told_before_anything_is_made(
    monkeypatch, no_commands, capsys, user, path, message
):
    monkeypatch.setattr(network_namespaces.os, "geteuid", lambda: user)
    monkeypatch.setattr(network_namespaces, "missing_capabilities", lambda status: [])
    if path is not None:
        monkeypatch.setenv("PATH", path)
    assert main(["bench", "network", "--size", "tiny"]) == 2
    assert message in capsys.readouterr().err


def test_a_containers_root_lacks_rights():
    assert missing_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n") == []
    assert missing_capabilities("CapEff:\t00000000a80425fb\n") == ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]


CASE = NetworkCase(
    label="made up",
    bits_per_s=250_000_000,
    trainers=("fsdp2", "nvfp4/mxfp8"),
    config=TINY_CONFIG,
    dtype=torch.bfloat16,
    rounds=3,
    steps=2,
)


def _rank(link: float, fsdp2: list[float], ours: list[float], sent: float) -> RankSeen:
    numel = TINY_CONFIG.numel
    return RankSeen(
        link_bits_per_s=link,
        trainers={
            "fsdp2": TrainerSeen(
                seconds=fsdp2, sent_bytes=[4.0 * numel] * 3, counted_bytes=None, loss=3.0
            ),
            "nvfp4/mxfp8": TrainerSeen(
                seconds=ours, sent_bytes=[sent * numel] * 3, counted_bytes=numel, loss=sent
            ),
        },
    )


def test_rows_are_of_the_slowest_rank_and_of_the_one_that_sends_most():
    seen = [
        _rank(245e6, [4.0, 4.0, 4.0], [1.0, 2.0, 1.0], 1.5),
        _rank(240e6, [2.0, 8.0, 2.0], [0.5, 1.0, 1.0], 1.0),
    ]
    result = summarise(CASE, seen)
    rivals, ours = result.rows
    assert (result.ranks, result.link_bits_per_s, result.steps_of_each) == (2, 240e6, 10)
    assert (rivals.seconds, rivals.counted_bytes) == ([4.0, 8.0, 4.0], None)
    assert (ours.ms.median, ours.over_fsdp2.median, ours.loss) == (1000.0, 0.25, 1.25)
    assert (ours.bytes_a_parameter, ours.counted_bytes) == (1.5, TINY_CONFIG.numel)
    heading, columns, first, second = format_result(result)
    assert heading.startswith(
        "250 Mbit/s each way, 2 ranks (before training the slowest link carried"
    )
    assert columns.endswith("loss after 10")
    assert first.startswith("fsdp2 ") and "4000 [4000, 8000]" in first and "1.000" in first
    assert second.startswith("nvfp4/mxfp8 ") and " 1.50 " in second and second.endswith("1.2500")


def test_without_fsdp2_nothing_is_over_it():
    seen = [_rank(245e6, [4.0] * 3, [1.0] * 3, 1.5)]
    (row,) = summarise(replace(CASE, trainers=("nvfp4/mxfp8",)), seen).rows
    assert row.over_fsdp2 is None


def _names_of(pid: int) -> list[str]:
    return [name for name in existing() if name.startswith(f"sidestream-{pid}-")]


@needs_namespaces
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_error_inside_removes_the_network(num_ranks):
    plan = plan_network(this_process(), num_ranks, 1_000_000)
    with pytest.raises(KeyError), network(plan):
        assert _names_of(os.getpid()) == sorted(plan.namespaces)
        raise KeyError
    assert _names_of(os.getpid()) == []


@needs_namespaces
def test_a_command_that_fails_is_named_and_what_was_made_is_removed():
    plan = plan_network(this_process(), 2, 1_000_000)
    wrong = (*plan.make[:-1], (*plan.make[-1], "colour", "blue"))
    entered = False
    said = r"(?s)tc -n .* colour blue: .*colour"
    with pytest.raises(NetworkFailed, match=said), network(replace(plan, make=wrong)):
        entered = True
    assert not entered
    assert _names_of(os.getpid()) == []


@needs_namespaces
def test_what_cannot_be_removed_is_said(monkeypatch, capsys):
    plan = plan_network(this_process(), 2, 1_000_000)
    with monkeypatch.context() as patched, network(plan):
        patched.setattr(network_namespaces, "removal", lambda name: ("ip", "netns", "lose", name))
    said = capsys.readouterr().err
    assert said.count("could not remove the network namespace") == 2
    assert all(f"run: ip netns lose {name}" in said for name in plan.namespaces)
    network_namespaces.remove(plan.namespaces)
    assert _names_of(os.getpid()) == []


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(200)
def test_a_killed_rank_removes_the_network():
    plan = plan_network(this_process(), 2, 10_000_000)
    with pytest.raises(RanksFailed, match="rank 1 failed"), network(plan):
        run_ranks(rank_work.die_last, 2, 9, enter=partial(enter, plan.ranks))
    assert _names_of(os.getpid()) == []


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT, signal.SIGTERM), 128 + signal.SIGINT),
        ((signal.SIGKILL,), -signal.SIGKILL),
    ],
    ids=["interrupted-twice", "killed"],
)
def test_an_interrupted_run_leaves_nothing(tmp_path, signals, code):
    command = "bench network --size tiny --rate 10mbit --trainers ddp --rounds 1000000"
    log = tmp_path / "log"
    with log.open("wb") as stream:
        run = subprocess.Popen(
            [sys.executable, "-m", "sidestream", *command.split()],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _until(lambda: b"warm-up 1" in log.read_bytes() or run.poll() is not None, 100.0)
        assert run.poll() is None, log.read_text()
        names = _names_of(run.pid)
        assert len(names) == 2
        ranks = [pid for name in names for pid in _processes_in(name)]
        assert len(ranks) == 2
        for number in signals:
            run.send_signal(number)
        assert run.wait(60.0) == code
    finally:
        run.kill()
        run.wait()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 30.0)
    if signals == (signal.SIGKILL,):
        assert _names_of(run.pid) == names
        with network(plan_network(this_process(), 2, 1_000_000)):
            pass  # whoever comes next cleans up
    assert _names_of(run.pid) == []


def _processes_in(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, check=True)
    return [int(pid) for pid in done.stdout.split()]


def _until(holds, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(200)
def test_a_run_in_namespaces(tmp_path, capsys):
    report = tmp_path / "now.json"
    trainers = ("plain", "ddp_bf16", "fsdp2", "fsdp2_tuned", "fp32/bf16", "mxfp8/mxfp8")
    arguments = ["--ranks", "3", "--trainers", ",".join(trainers), "--json", str(report)]
    before = sorted(Path("/sys/class/net").iterdir())
    fixed = ["bench", "network", "--size", "tiny", "--rate", "40mbit", "--rounds", "2"]
    assert main([*fixed, *arguments]) == 0
    assert _names_of(os.getpid()) == []
    assert sorted(Path("/sys/class/net").iterdir()) == before
    printed = capsys.readouterr().out
    assert "40 Mbit/s each way" in printed
    (found,) = json.loads(report.read_text())["networks"]
    # Half a second at the rate, of which the bucket gives 128 KiB at once: 5 % of it.
    assert 0.4 * 40e6 < found["link_bits_per_s"] < 1.1 * 40e6
    rows = {row["trainer"]: row for row in found["rows"]}
    assert tuple(rows) == trainers
    assert all(len(row["seconds"]) == 2 for row in rows.values())
    assert rows["plain"]["sent_bytes"] < 2000  # barriers alone
    # The same sums in the same dtypes; a rank alone has learnt its batch better.
    assert rows["fp32/bf16"]["loss"] == pytest.approx(rows["fsdp2"]["loss"], abs=0.02)
    exact, packed = rows["fp32/bf16"], rows["mxfp8/mxfp8"]
    for row in (exact, packed):
        assert row["counted_bytes"] < row["sent_bytes"] < 1.5 * row["counted_bytes"] + 8000
    assert packed["counted_bytes"] < 0.6 * exact["counted_bytes"]
    assert exact["sent_bytes"] < rows["fsdp2"]["sent_bytes"]
