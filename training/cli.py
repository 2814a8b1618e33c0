"""The command line: `sidestream train` and `sidestream doctor`, also as `python -m sidestream`."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from ..sharding import CommunicationError
from .errors import OptionsError, UsageError
from .launcher import LAUNCHED_VARIABLE, launch
from .options import TrainOptions, add_train_arguments, options_from
from .ranks import Place, choose_device, default_num_ranks, follow_launcher, place_from

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 cannot be done as asked, 130
    interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    namespace = _parser().parse_args(arguments)
    try:
        if namespace.command == "doctor":
            from .doctor import run_doctor

            return run_doctor(as_json=namespace.json)
        return _train(options_from(namespace), arguments)
    except UsageError as error:
        print(f"sidestream: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("sidestream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sidestream", description="Sharded data-parallel training on Triton kernels."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a byte-level GPT on any text",
        description="Train a byte-level GPT on any text. "
        "The last line of the output is RESULT and one JSON object.",
    )
    add_train_arguments(train)
    doctor = commands.add_parser(
        "doctor", help="look at this machine and say what will be used, and why"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


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
