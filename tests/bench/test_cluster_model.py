"""The model of a cluster against what can be computed by hand."""

import argparse
import math
from typing import Any

import pytest
import torch

import sidestream as ss
from sidestream.bench import cluster_model
from sidestream.bench.cluster_links import EXCHANGES, NIC, NVLINK, Cluster, Span
from sidestream.bench.cluster_steps import DecoderSizes, Gpu, record_step, stand_ins
from sidestream.bench.virtual_steps import Recording
from sidestream.bench.virtual_time import Work, schedule
from sidestream.cli import main
from sidestream.kernels import message_layout
from sidestream.training.errors import UsageError

NUMEL = 64 * 1024 * 16
TWO_NODES = Cluster(2, 1)
# What takes no time of its own is left out of sums by hand.
NO_TIME = {"flops_per_ms": math.inf, "memory_gb_per_s": math.inf, "latency_ms": 0.0}


def _works(*works: tuple[float, float, set[int]]) -> list[float]:
    return schedule(
        [Work(own, {"link": load}, frozenset(after)) for own, load, after in works],
        {
            "link": 1e-6  # a byte a ms
        },
    )


def test_a_work_takes_its_own_time_and_then_that_of_its_bytes() -> None:
    assert _works((3.0, 4.0, set()), (1.0, 0.0, {0})) == [7.0, 8.0]


def test_works_share_a_link_evenly_while_both_move_bytes() -> None:
    # Until 2 one of them alone; at 8 the second one ends, and the first has its link again.
    assert _works((0.0, 10.0, set()), (2.0, 3.0, set())) == [13.0, 8.0]


def test_a_work_moves_over_all_its_links_at_once() -> None:
    ends = schedule([Work(0.0, {"a": 2e6, "b": 6e6})], {"a": 1.0, "b": 2.0})
    assert ends == [3.0]


def test_what_moves_over_links() -> None:
    # Of 64 ranks, 8 a node, 7 others are in the node.
    assert Span(64, 8).exchange(64.0, 1.0) == Work(63.0, {NVLINK: 7.0, NIC: 56.0})
    assert Span(8, 8).exchange(64.0, 0.0) == Work(0.0, {NVLINK: 56.0, NIC: 0.0})
    assert Span(8, 1).exchange(64.0, 0.0) == Work(0.0, {NVLINK: 0.0, NIC: 56.0})
    assert Span(64, 8).gather(512.0, 0.0) == Work(0.0, {NVLINK: 441.0, NIC: 63.0})
    assert Span(8, 8).gather(64.0, 0.0) == Work(0.0, {NVLINK: 56.0, NIC: 0.0})
    assert Span(8, 1).gather(64.0, 0.0) == Work(0.0, {NVLINK: 0.0, NIC: 56.0})


def _record(
    cluster: Cluster = TWO_NODES,
    exchange: str = "flat",
    blocks: int = 1,
    tokens: int = 1,
    policy: dict[str, Any] | None = None,
    **gpu: float,
) -> Recording:
    mixed = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, **(policy or {}))
    return record_step(
        DecoderSizes(blocks, NUMEL, 0),
        tokens,
        Gpu(**{**NO_TIME, **gpu}),
        cluster,
        EXCHANGES[exchange],
        mixed,
    )


def test_of_one_block_nothing_overlaps() -> None:
    nic_gb_per_s, flops_per_ms = 3.0, 4e6
    found = _record(flops_per_ms=flops_per_ms, latency_ms=0.25, tokens=5)
    # Two gathers and an exchange of 2 bytes an element, of which a half is the other rank's.
    transfer_ms = 0.25 + NUMEL / (nic_gb_per_s * 1e6)
    compute_ms = 6 * NUMEL * 5 / flops_per_ms
    step_ms = found.step_ms({NVLINK: 1.0, NIC: nic_gb_per_s})
    assert step_ms == pytest.approx(3 * transfer_ms + compute_ms)


def test_kernels_take_time_by_bytes() -> None:
    found = _record(memory_gb_per_s=2.0)
    # Casts of main and the gather's place, twice; pack 2 + 2; sum of halves of two ranks to FP32.
    nbytes = NUMEL * (2 * (4 + 2) / 2 + 4 + (2 * 2 + 4) / 2)
    step_ms = found.step_ms({NVLINK: math.inf, NIC: math.inf})
    assert step_ms == pytest.approx(nbytes / 2e6)


def test_fast_links_are_hidden_but_for_the_ends_of_forward_and_backward() -> None:
    blocks, flops_per_ms = 6, 1e6
    found = _record(blocks=blocks, flops_per_ms=flops_per_ms)
    compute_ms = blocks * 6 * NUMEL / flops_per_ms
    transfer_ms = NUMEL / (1000 * 1e6)
    step_ms = found.step_ms({NVLINK: 1.0, NIC: 1000.0})
    # The first gather of either, and the last exchange.
    assert step_ms == pytest.approx(compute_ms + 3 * transfer_ms, rel=1e-9)


SLOWER = [800.0, 400.0, 200.0, 100.0, 50.0, 25.0, 3.0]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_slower_nic_never_makes_a_step_shorter(exchange: str) -> None:
    found = _record(Cluster(4, 2), exchange, blocks=4, flops_per_ms=3e9)
    steps = [found.step_ms({NVLINK: 450.0, NIC: gb_per_s}) for gb_per_s in SLOWER]
    assert steps == sorted(steps)
    assert steps[-1] > 4 * steps[0]


BYTES = {  # of an element: in the node, to other nodes; 8 nodes of 8
    # Gathers of 2 bytes by rings of 64, 2 bytes to each of 63 others, 7 of them in the node.
    "flat": (2 * 2 * 63 / 64 * 7 / 8 + 2 * 7 / 64, 2 * 2 * 63 / 64 / 8 + 2 * 56 / 64),
    # Of an eighth: two gathers, and FP32 sums.
    "hierarchical": (3 * 2 * 7 / 8, (2 * 2 + 4) / 8 * 7 / 8),
    # FP32 sums and FP32 means back.
    "hsdp": (3 * 2 * 7 / 8, (4 + 4) / 8 * 7 / 8),
    # Of an eighth: one gather, and FP32 sums.
    "hfsdp": (3 * 2 * 7 / 8, (2 + 4) / 8 * 7 / 8),
}


@pytest.mark.parametrize(("exchange", "expected"), BYTES.items(), ids=BYTES)
def test_bytes_that_a_step_moves(exchange: str, expected: tuple[float, float]) -> None:
    moved = _record(Cluster(8, 8), exchange).step_bytes()
    assert (moved[NVLINK] / NUMEL, moved[NIC] / NUMEL) == pytest.approx(expected)


FORMATS = {"mxfp8": "mxfp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "fp8_row"}


@pytest.mark.parametrize(("name", "format"), FORMATS.items(), ids=FORMATS)
def test_messages_have_the_bytes_of_the_kernels_layout_at_full_size(name: str, format: str) -> None:
    assert stand_ins(DecoderSizes(1, NUMEL, 0), 64).block < NUMEL
    moved = _record(Cluster(8, 8), policy={"grad_wire": name, "param_wire": "mxfp8"}).step_bytes()
    gradients, weights = (
        64 * message_layout(form, [NUMEL // 64]).num_bytes for form in (format, "mxfp8")
    )
    assert moved[NIC] == pytest.approx(2 * weights * 63 / 64 / 8 + gradients * 56 / 64)


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    cluster_model.add_options(parser)
    return parser.parse_args(arguments)


def test_report_says_what_it_assumes_and_compares_with_bf16_flat() -> None:
    report = cluster_model.report(
        _options("--cluster", "2x2", "--blocks=2", "--wires=nvfp4/mxfp8", "--exchanges=hsdp")
    )
    assert "nobody measured" in report
    rows = [line.split() for line in report.splitlines() if "/" in line.split(" ")[0]]
    table = [row for row in rows if len(row) == 7 and row[0] != "gradients/weights"]
    assert [row[:2] for row in table] == [["bf16/bf16", "flat"], ["nvfp4/mxfp8", "hsdp"]]
    (*_, first), (*_, second) = table
    assert float(first) == 1.0
    assert float(second) == pytest.approx(float(table[1][2]) / float(table[0][2]), abs=2e-3)


REFUSED = {
    "no GPUs": ("--cluster", "8x"),
    "no nodes": ("--cluster", "0x8"),
    "one GPU": ("--cluster", "1x1"),
    "no unit": ("--nic", "400"),
    "unit of tc that means bytes": ("--nic", "400gbps"),
    "no rate": ("--nvlink", "0GB/s"),
    "rate too much": ("--nic", "400gbit,"),
    "more than the peak": ("--mfu", "1.5"),
    "not finite": ("--tflops", "inf"),
    "no such exchange": ("--exchanges", "ring"),
    "no such wire": ("--wires", "bf16/fp5"),
    "half a wire": ("--wires", "mxfp8"),
    "of a rival": ("--wires", "fsdp2"),
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_refused_arguments(arguments: tuple[str, ...]) -> None:
    with pytest.raises(argparse.ArgumentError, match="expected"):
        _options(*arguments)


IMPOSSIBLE = {
    "a block too small": (["--cluster=300x8", "--block-params=1048576"], "at most 1024 GPUs"),
    "too many GPUs": (["--cluster=9999x8"], "stand-ins of at most"),
    "one node": (["--cluster=1x8", "--exchanges=hsdp"], "expected flat"),
    "one GPU a node": (["--cluster=8x1", "--exchanges=hierarchical"], "expected flat"),
}


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cluster_model.report(_options(*arguments))


MIXED = {
    "of measurements": (["--cluster=2x2", "--rate=250mbit,3gbit"], "--rate: expected the default"),
    "results": (["--cluster=2x2", "--json=found.json"], "--json: expected the default"),
    "of the model": (["--latency-us=0", "--ranks=3"], "--latency-us: expected the default"),
}


@pytest.mark.parametrize(("arguments", "message"), MIXED.values(), ids=MIXED)
def test_options_that_nobody_would_look_at(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "network", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cluster=1x2", "--blocks=2", "--wires=mxfp8/mxfp8", "--nic=400gbit"]
    assert main(["bench", "network", *arguments]) == 0
    assert "mxfp8/mxfp8        flat" in capsys.readouterr().out
