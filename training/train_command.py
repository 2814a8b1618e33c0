"""`sidestream train`: trains as one rank, or starts the ranks of this machine and watches them."""

import argparse
import os
import sys
import traceback
from typing import NoReturn

from ..sharding import CommunicationError
from .errors import OptionsError, UsageError
from .launcher import LAUNCHED_VARIABLE, launch
from .options import TrainOptions, add_train_arguments, options_from
from .ranks import Place, choose_device, default_num_ranks, follow_launcher, place_from

EXIT_FAILURE = 1


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train` and its options."""
    parser = subparsers.add_parser(
        "train",
        help="train a byte-level GPT on any text",
        description="Train a byte-level GPT on any text. "
        "The last line of the output is RESULT and one JSON object.",
    )
    add_train_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train as asked and return the exit code.

    Raises:
        UsageError: what was asked for cannot be done; no rank was started.
    """
    return _train(options_from(options), options.arguments)


def _train(options: TrainOptions, arguments: list[str]) -> int:
    """Train as one rank where a launcher started us or one rank is enough; else start the ranks."""
    from .trainer import plan_run

    place = place_from(os.environ)
    if place is not None:
        return _train_as_rank(options, place)
    num_ranks = options.nproc or default_num_ranks(options.device)
    if options.kill_rank is not None and options.kill_rank >= num_ranks:
        raise OptionsError(
            f"expected --kill-rank below {num_ranks}, got {options.kill_rank}; ranks count from 0"
        )
    choose_device(options.device, num_ranks)
    plan_run(options, num_ranks)
    if num_ranks == 1:
        return _train_as_rank(options, Place())
    return launch([sys.executable, "-m", "sidestream", *arguments], num_ranks)


def _train_as_rank(options: TrainOptions, place: Place) -> int:
    from .trainer import plan_run, train

    if LAUNCHED_VARIABLE in os.environ:
        follow_launcher()
    if options.nproc not in (None, place.local_world_size):
        raise OptionsError(
            f"expected --nproc {place.local_world_size} as the launcher started, got "
            f"{options.nproc}; leave it out"
        )
    plan = plan_run(options, place.world_size)
    try:
        result = train(plan, place)
    except Exception as error:
        if place.init_method is None or isinstance(error, UsageError):
            raise
        _end_failed_rank(place.rank, error)
    if place.is_first:
        if options.json is not None:
            result.write(options.json)
        print(result.line(), flush=True)
    return 0


def _end_failed_rank(rank: int, error: Exception) -> NoReturn:
    """Tell the error and end the process at once: an orderly end would wait for threads that wait
    for dead peers.
    """
    # Another rank's death is told by one line: where this rank stood then is no trace of its cause.
    if not isinstance(error, CommunicationError):
        traceback.print_exception(error)
    where = " ".join(getattr(error, "__notes__", []))
    print(
        f"sidestream: rank {rank} failed {where}: {type(error).__name__}: {error}", file=sys.stderr
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)
