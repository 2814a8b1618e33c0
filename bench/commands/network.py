"""`sidestream bench network`: what a slower network makes of a step, ours beside FSDP2 and DDP.

    sudo sidestream bench network --rate 250mbit,1gbit --ranks 2,4 --json now.json
    sudo sidestream bench network --trainers fsdp2,bf16/bf16,nvfp4/mxfp8
    sidestream bench network --cluster 8x8 --nic 400gbit,100gbit

Makes network namespaces of its own, joined by links of the rate (Linux, root and iproute2), and
removes them, also when interrupted. All trainers share the processes of a run and take turns. With
--cluster nothing is measured: a model of a GPU cluster is run instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...training.errors import UsageError
from ...training.launch.interruption import raising_signals
from ...training.paths import require_writable_file
from .. import cluster_model
from ..models import STEP_TIME_CONFIG, TINY_CONFIG, DecoderConfig
from ..network_namespaces import NetworkFailed, enter, network, require_network, this_process
from ..network_plan import MAX_RANKS, MIN_RANKS, plan_network
from ..ranks import RanksFailed, run_ranks
from ..reports import document, write_json
from ..trainer_names import NETWORK_RIVALS
from .parsing import Rate, count, counts, rates, trainers_of

if TYPE_CHECKING:
    from ..network_table import NetworkResult
    from ..network_worker import NetworkCase

DEFAULT_TRAINERS = (
    *NETWORK_RIVALS,
    "fp32/bf16",
    "bf16/bf16",
    "mxfp8/mxfp8",
    "nvfp4/mxfp8",
    "mxfp4/mxfp8",
)
SIZES: dict[str, DecoderConfig] = {"26m": STEP_TIME_CONFIG, "tiny": TINY_CONFIG}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# A step of any trainer sends less than this a parameter, and computes for less than so long.
_MOST_BYTES_A_PARAMETER, _MOST_COMPUTE_S, _START_S = 32, 30.0, 120.0
_MIN_RATE, _MAX_RATE = 10**6, 10**11  # bits a second
_DEFAULT = "default: %(default)s"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `network`."""
    parser = subparsers.add_parser(
        "network", help="step time over links of a given rate, beside FSDP2", description=__doc__
    )
    parser.add_argument(
        "--rate",
        type=link_rates,
        default="250mbit,1gbit",
        metavar="RATE,...",
        help="of every link, each way (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=ranks, default=(2,), metavar="N,...", help="how many (default: 2)"
    )
    parser.add_argument(
        "--trainers",
        type=trainers_of(NETWORK_RIVALS),
        default=DEFAULT_TRAINERS,
        metavar="NAME,...",
        help=f"of {', '.join(NETWORK_RIVALS)}, and ours as GRADIENTS/WEIGHTS, what each travels as "
        f"(default: these and {', '.join(DEFAULT_TRAINERS[len(NETWORK_RIVALS) :])})",
    )
    parser.add_argument(
        "--size", choices=SIZES, default="26m", help=f"parameters of the decoder ({_DEFAULT})"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help=f"of forward and backward ({_DEFAULT})"
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=5,
        metavar="N",
        help=f"timed turns of every trainer ({_DEFAULT})",
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=1,
        metavar="N",
        help=f"that it takes in each turn ({_DEFAULT})",
    )
    parser.add_argument(
        "--prefetch",
        type=count,
        default=1,
        metavar="N",
        help=f"units that ours gather ahead ({_DEFAULT})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and samples here")
    measured = vars(parser.parse_args([]))
    cluster_model.add_options(parser)
    modelled = {
        name: value
        for name, value in vars(parser.parse_args([])).items()
        if name not in measured and name != "cluster"
    }
    parser.set_defaults(run=run, measured=measured, modelled=modelled)


def ranks(text: str) -> tuple[int, ...]:
    """How many ranks; several numbers with commas between them."""
    given = counts(text)
    if given[0] < MIN_RANKS or given[-1] > MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"expected {MIN_RANKS} to {MAX_RANKS} ranks, got {text!r}; pass such as 2,4"
        )
    return given


def link_rates(text: str) -> tuple[int, ...]:
    """Bits a second of links; several rates with commas between them, each once."""
    return tuple(dict.fromkeys(map(_link_rate, rates(text))))


def _link_rate(given: Rate) -> int:
    if not _MIN_RATE <= given.bits_per_s <= _MAX_RATE:
        raise argparse.ArgumentTypeError(
            f"expected rates from 1mbit to 100gbit, got {given.text!r}; pass such as 250mbit,1gbit"
        )
    return round(given.bits_per_s)


def run(options: argparse.Namespace) -> int:
    """Measure, or run the model, and print; 1 when a network could not be made or a rank failed."""
    if options.cluster is not None:
        require_defaults(options, options.measured, "with --cluster, which measures nothing")
        print(cluster_model.report(options))
        return 0
    require_defaults(options, options.modelled, "without --cluster, which they describe")
    if options.json:
        require_writable_file(str(options.json), "--json")
    require_network()
    from ..network_table import LEGEND

    config = SIZES[options.size]
    print(
        f"network: gloo, {config.numel:,} parameters, {options.dtype} compute, a thread a rank, "
        f"torch {torch.__version__}\n{LEGEND}",
        flush=True,
    )
    results: list[NetworkResult] = []
    try:
        with raising_signals(once=True):
            for num_ranks in options.ranks:
                for bits_per_s in options.rate:
                    measure(options, num_ranks, bits_per_s, results.append)
    except (NetworkFailed, RanksFailed) as error:
        print(f"sidestream bench network: {error}", file=sys.stderr)
        return 1
    if options.json:
        write_json(options.json, content_of(options, results))
    return 0


def require_defaults(
    options: argparse.Namespace, defaults: Mapping[str, object], where: str
) -> None:
    """Refuse options that would not be looked at.

    Raises:
        UsageError: one of `defaults` has another value; named.
    """
    given = [name for name, default in defaults.items() if getattr(options, name) != default]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{named}: expected the default {where}, got another value; leave it out")


def measure(
    options: argparse.Namespace,
    num_ranks: int,
    bits_per_s: int,
    keep: Callable[[NetworkResult], None],
) -> None:
    """One network from its making to its removal; what was seen is printed and kept before that."""
    from ..network_table import describe_rate, format_result, summarise
    from ..network_worker import NetworkCase, work_on_network

    case = NetworkCase(
        label=f"{num_ranks} ranks, {describe_rate(bits_per_s)}",
        bits_per_s=bits_per_s,
        trainers=options.trainers,
        config=SIZES[options.size],
        dtype=DTYPES[options.dtype],
        rounds=options.rounds,
        steps=options.steps,
        prefetch=options.prefetch,
    )
    plan = plan_network(this_process(), num_ranks, bits_per_s)
    with network(plan):
        seen = run_ranks(
            work_on_network,
            num_ranks,
            case,
            enter=partial(enter, plan.ranks),
            timeout_s=time_limit_s(case, num_ranks),
        )
        result = summarise(case, seen)
        print("\n".join(["", *format_result(result)]), flush=True)
        keep(result)


def time_limit_s(case: NetworkCase, num_ranks: int) -> float:
    """Longer than any run takes that goes on."""
    sent_s = case.config.numel * _MOST_BYTES_A_PARAMETER * 8 / case.bits_per_s
    step_s = sent_s + _MOST_COMPUTE_S * num_ranks
    return _START_S + case.steps_of_each * len(case.trainers) * step_s


def content_of(options: argparse.Namespace, results: list[NetworkResult]) -> dict[str, Any]:
    """Of the file: machine, settings, and the rows of every network with their samples."""
    config = SIZES[options.size]
    return {
        **document("network", options.arguments, torch.device("cpu")),
        "settings": {
            "dtype": options.dtype,
            "parameters": config.numel,
            "config": asdict(config),
            "rounds": options.rounds,
            "prefetch": options.prefetch,
            "steps": options.steps,
        },
        "networks": [asdict(result) for result in results],
    }
