"""`sidestream bench network --cluster NODESxGPUS`: what options it has, and its report."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..training.errors import UsageError
from .cluster_links import EXCHANGES, FLAT, NIC, NVLINK, Cluster
from .cluster_parsing import cluster_of, not_negative, positive, share, whole
from .commands.parsing import Rate, count, names_of, rate, rates, trainers_of
from .progress import shown

if TYPE_CHECKING:
    from ..sharding.precision import MixedPrecisionPolicy
    from .cluster_steps import DecoderSizes
    from .virtual_steps import Recording

DEFAULT_WIRES = ("fp32/bf16", "bf16/bf16", "mxfp8/mxfp8", "nvfp4/mxfp8")
BASELINE = ("bf16/bf16", FLAT)
PARTIALS = ("fp32", "bf16")
# Defaults are texts, as if they were given.
_NUMBERS: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
    (
        "--nic",
        rates,
        "400gbit,200gbit,100gbit,50gbit",
        "rates of a GPU to other nodes, one way; the tables begin with the first",
    ),
    ("--nvlink", rate, "450GB/s", "rate of a GPU inside its node, one way"),
    ("--memory", rate, "3000GB/s", "rate of a GPU's memory"),
    ("--latency-us", not_negative, "5", "of a message, in a node and between nodes"),
    ("--tflops", positive, "989", "peak of a GPU's matrix products"),
    ("--mfu", share, "0.5", "the part of it that compute reaches"),
    ("--tokens", count, "4096", "of a step, a GPU"),
    ("--blocks", count, "32", "of the decoder"),
    ("--block-params", count, "218112000", "parameters of a block"),
    ("--table-params", whole, "525336576", "of the embedding and of the head each, 0: none"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--cluster` and what belongs to it; without it they say nothing."""
    group = parser.add_argument_group(
        "a model of a GPU cluster",
        "in virtual time, in this process, in place of a measurement. Nobody measured the "
        "defaults.",
    )
    group.add_argument(
        "--cluster", type=cluster_of, metavar="NxG", help="N nodes of G GPUs; asks for the model"
    )
    for name, type_, default, text in _NUMBERS:
        group.add_argument(
            name, type=type_, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--partials",
        choices=PARTIALS,
        default="fp32",
        help="how sums of a node travel to others (default: fp32)",
    )
    group.add_argument(
        "--wires",
        type=trainers_of(()),
        default=DEFAULT_WIRES,
        metavar="GRADIENTS/WEIGHTS,...",
        help=f"formats by the names of MixedPrecisionPolicy (default: {','.join(DEFAULT_WIRES)})",
    )
    group.add_argument(
        "--exchanges",
        type=names_of(tuple(EXCHANGES)),
        metavar="NAME,...",
        help=f"from {', '.join(EXCHANGES)} (default: all; of one node, or GPU a node, flat)",
    )


@dataclass(frozen=True)
class _Case:
    """One wire and one exchange, and what the runtime did with them."""

    wires: str
    exchange: str
    recording: Recording

    def step_ms(self, options: argparse.Namespace, nic: Rate) -> float:
        return self.recording.step_ms({NVLINK: options.nvlink.gb_per_s, NIC: nic.gb_per_s})


def report(options: argparse.Namespace) -> str:
    """The tables, and what they assume.

    Raises:
        UsageError: an exchange that needs more nodes, or a model that is too small for so many
            GPUs, or the GPUs too many.
    """
    from .cluster_steps import DecoderSizes

    asked = DecoderSizes(options.blocks, options.block_params, options.table_params)
    decoder = _fitted(asked, options)
    cases = _recorded(decoder, options)
    tables = [_assumptions(decoder, options), _steps(cases, decoder, options)]
    if len(options.nic) > 1:
        tables.append(_sweep(cases, options))
    return "\n\n".join(tables)


def _fitted(decoder: DecoderSizes, options: argparse.Namespace) -> DecoderSizes:
    """`decoder` with tables as its stand-ins make them."""
    from .cluster_steps import MAX_STAND_IN_NUMEL, PART_NUMEL, stand_ins

    world_size = options.cluster.world_size
    most = decoder.block_numel // PART_NUMEL
    if world_size > most:
        raise UsageError(
            f"--cluster: expected at most {most} GPUs for blocks of {decoder.block_numel} "
            f"parameters, {PART_NUMEL} for each GPU at least, got {world_size}; take fewer, or "
            "larger blocks (--block-params)"
        )
    small = stand_ins(decoder, world_size)
    numel = small.numel(decoder)
    if numel > MAX_STAND_IN_NUMEL:
        raise UsageError(
            f"--cluster: expected stand-ins of at most {MAX_STAND_IN_NUMEL} elements in all, got "
            f"{numel}, for {world_size} GPUs and {decoder.blocks} blocks; take fewer of one"
        )
    return replace(decoder, table_numel=round(small.table * small.scale))


def _policy(wires: str, partials: str) -> MixedPrecisionPolicy:
    import torch

    from ..sharding.precision import MixedPrecisionPolicy

    gradients, weights = wires.split("/")
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        grad_wire=gradients,
        param_wire=weights,
        grad_partial_dtype=torch.float32 if partials == "fp32" else torch.bfloat16,
    )


def _exchanges(options: argparse.Namespace) -> Sequence[str]:
    cluster = options.cluster
    can_split = min(cluster.nodes, cluster.per_node) > 1
    chosen = options.exchanges or (tuple(EXCHANGES) if can_split else (FLAT,))
    for name in chosen:
        if EXCHANGES[name].splits and not can_split:
            raise UsageError(
                f"--exchanges: expected {FLAT} where there is one node or one GPU a node, got "
                f"{name} for {cluster.nodes}x{cluster.per_node}; leave it out"
            )
    return chosen


def _recorded(decoder: DecoderSizes, options: argparse.Namespace) -> list[_Case]:
    """The baseline first."""
    from .cluster_steps import Gpu, record_step

    gpu = Gpu(
        flops_per_ms=options.tflops * options.mfu * 1e9,
        memory_gb_per_s=options.memory.gb_per_s,
        latency_ms=options.latency_us / 1e3,
    )
    chosen = itertools.product(options.wires, _exchanges(options))
    keys = list(dict.fromkeys([BASELINE, *chosen]))
    policies = {wires: _policy(wires, options.partials) for wires, _ in keys}
    cases = []
    with shown(len(keys), "steps") as step:
        for wires, exchange in keys:
            recording = record_step(
                decoder,
                options.tokens,
                gpu,
                options.cluster,
                EXCHANGES[exchange],
                policies[wires],
            )
            cases.append(_Case(wires, exchange, recording))
            step(f"{wires} {exchange}")
    return cases


def _compute_ms(decoder: DecoderSizes, options: argparse.Namespace) -> float:
    flops = 6 * decoder.multiplied_numel * options.tokens
    return float(flops / (options.tflops * options.mfu * 1e9))


def _assumptions(decoder: DecoderSizes, options: argparse.Namespace) -> str:
    cluster: Cluster = options.cluster
    asked = f" (for {options.table_params / 1e6:.1f} M)"
    tables = f", embedding and head of {decoder.table_numel / 1e6:.1f} M"
    tables = tables + asked if decoder.table_numel else ""
    rows = {
        "cluster": f"{cluster.nodes} nodes of {cluster.per_node} GPUs, each with NVLink of "
        f"{options.nvlink} in its node and a NIC of {options.nic[0]} to others, one way",
        "gather": "as NCCL's rings, one a NIC; exchange: a message a peer. Of N ranks either waits "
        f"N - 1 times {options.latency_us:g} us",
        "link": "shared evenly by what moves over it; gathers and exchanges have a communicator "
        "each, that carries one at a time",
        "kernels": f"pack, sum, decode: what they read and write at {options.memory}, beside "
        "compute, which they do not slow",
        "decoder": f"{decoder.blocks} blocks of {decoder.block_numel / 1e6:.1f} M parameters"
        f"{tables}: {decoder.numel / 1e9:.2f} G; bf16, ZeRO-3, FP32 main parameters",
        "compute": f"6 * {decoder.multiplied_numel / 1e9:.2f} G parameters (no embedding) * "
        f"{options.tokens} tokens / ({options.tflops:g} TFLOPS * {options.mfu:g}) = "
        f"{_compute_ms(decoder, options):.1f} ms, a third of it forward",
        "sums": f"of a node's ranks travel to other nodes in {options.partials} (all but flat)",
        "left out": "products of attention itself, the optimizer, the host, congestion, stragglers",
    }
    lines = ["A model: nobody measured these numbers. They say what a schedule can hide."]
    return "\n".join([*lines, *(f"{name:<9} {text}" for name, text in rows.items())])


def _steps(cases: Sequence[_Case], decoder: DecoderSizes, options: argparse.Namespace) -> str:
    compute_ms, nic = _compute_ms(decoder, options), options.nic[0]
    baseline_ms = cases[0].step_ms(options, nic)
    lines = [
        f"steps with NICs of {nic}; exposed: beyond compute; MB: what a GPU sends; ratio: to the "
        f"step of {' '.join(BASELINE)}",
        f"{'gradients/weights':<18} {'exchange':<13} {'step ms':>9} {'exposed ms':>11} "
        f"{'in node MB':>11} {'to nodes MB':>12} {'ratio':>6}",
    ]
    for case in cases:
        step_ms, moved = case.step_ms(options, nic), case.recording.step_bytes()
        lines.append(
            f"{case.wires:<18} {case.exchange:<13} {step_ms:9.1f} {step_ms - compute_ms:11.1f} "
            f"{moved[NVLINK] / 1e6:11.0f} {moved[NIC] / 1e6:12.0f} {step_ms / baseline_ms:6.3f}"
        )
    return "\n".join(lines)


def _sweep(cases: Sequence[_Case], options: argparse.Namespace) -> str:
    lines = [
        "step ms by the rate of NICs",
        f"{'gradients/weights':<18} {'exchange':<13}"
        + "".join(f" {nic.text:>9}" for nic in options.nic),
    ]
    for case in cases:
        found = "".join(f" {case.step_ms(options, nic):9.1f}" for nic in options.nic)
        lines.append(f"{case.wires:<18} {case.exchange:<13}{found}")
    return "\n".join(lines)
