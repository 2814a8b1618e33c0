"""`sidestream train`: trains as one rank, or starts the ranks of this machine and watches them."""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from ..sharding import CommunicationError
from .errors import OptionsError, RunStopped, UsageError
from .launch.asking import answering
from .launch.boards import Board, FolderBoard, board_of_store
from .launch.heartbeat import Heart, Silence, Whereabouts
from .launch.interruption import end_on_signals, raising_signals
from .launch.launcher import LAUNCHED_VARIABLE, launch
from .launch.ranks import (
    AGENT_VARIABLE,
    GROUP_TIMEOUT,
    Place,
    choose_device,
    default_num_ranks,
    follow_agent,
    follow_launcher,
    place_from,
)
from .launch.relaunching import TEMPORARY_VARIABLE, relaunching, rotation_of
from .launch.remarks import say
from .options import TrainOptions, add_train_arguments, options_from

if TYPE_CHECKING:
    from .result import RunResult

# Not `-m sidestream`: a signal that comes while torch is imported would print a traceback a rank.
# Who is asked by SIGUSR1 before there is an answer gives none, and does not end.
RANK_PROGRAM = """\
import signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from sidestream.cli import main
sys.exit(main())
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train` and its options."""
    parser = subparsers.add_parser(
        "train",
        help="train a byte-level GPT on any text",
        description="Train a byte-level GPT on any text. The last line of the output is RESULT "
        "and one JSON object.",
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
    place = place_from(os.environ)
    try:
        if place is not None:
            return _train_as_rank(options, place)
        with raising_signals():
            return _start_ranks(options, arguments)
    except RunStopped as stopped:  # rank 0 has said why
        return stopped.code


def _start_ranks(options: TrainOptions, arguments: list[str]) -> int:
    from .plan import plan_run
    from .trainer import train

    num_ranks = options.nproc or default_num_ranks(options.device)
    if options.kill_rank is not None and options.kill_rank >= num_ranks:
        raise OptionsError(
            f"expected --kill-rank below {num_ranks}, got {options.kill_rank}; ranks count from 0"
        )
    choice = choose_device(options.device, num_ranks)
    if options.attributes_faults:
        rotation = rotation_of(choice.kind, num_ranks, torch.cuda.device_count())
        given = {} if options.checkpoint is not None else {TEMPORARY_VARIABLE: "1"}
        with _with_checkpoints(options, arguments) as (options, arguments):
            plan_run(options, num_ranks)
            return relaunching(
                lambda environment, is_resumed: _launch(
                    options,
                    [*arguments, *["--resume"] * is_resumed],
                    num_ranks,
                    can_stop=not given,
                    environment={**environment, **given},
                ),
                rotation,
            )
    plan = plan_run(options, num_ranks)
    if num_ranks > 1:
        return _launch(options, arguments, num_ranks, can_stop=options.checkpoint is not None)
    whereabouts = Whereabouts()
    with answering(partial(whereabouts.told, 0)):
        result = train(plan, Place(), whereabouts)
    _hand_back(result, options)
    return 0


def _launch(
    options: TrainOptions,
    arguments: Sequence[str],
    num_ranks: int,
    *,
    can_stop: bool,
    environment: Mapping[str, str] | None = None,
) -> int:
    limit_s = options.heartbeat_limit_s
    return launch(
        [sys.executable, "-c", RANK_PROGRAM, *arguments],
        num_ranks,
        silence=Silence(limit_s, limit_s) if limit_s else None,
        can_stop=can_stop,
        environment=environment,
    )


@contextmanager
def _with_checkpoints(
    options: TrainOptions, arguments: Sequence[str]
) -> Iterator[tuple[TrainOptions, list[str]]]:
    """Give options and arguments with a folder of checkpoints, from which ranks start anew: one for
    the time of the block where none was named: who stops that run cannot resume from there.
    """
    if options.checkpoint is not None:
        yield options, list(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="sidestream-rerun-") as folder:
        say(f"checkpoints go to {folder} until the run ends; --checkpoint DIR keeps them")
        yield replace(options, checkpoint=folder), [*arguments, "--checkpoint", folder]


def _train_as_rank(options: TrainOptions, place: Place) -> int:
    end_on_signals()
    if LAUNCHED_VARIABLE in os.environ:
        follow_launcher()
    if options.nproc not in (None, place.local_world_size):
        raise OptionsError(
            f"expected --nproc {place.local_world_size} as the launcher started, got "
            f"{options.nproc}; leave it out"
        )
    whereabouts = Whereabouts()
    heart = _heart_of(options, place, whereabouts)
    if AGENT_VARIABLE in os.environ and LAUNCHED_VARIABLE not in os.environ:
        follow_agent(
            lambda: heart.end(
                f"rank {place.rank} ends ({whereabouts.doing}): torchrun's agent, which started "
                "it, has ended or was killed; look for its error on that machine"
            )
        )
    if options.heartbeat_limit_s:
        heart.start()
    from .plan import plan_run
    from .trainer import train

    try:
        plan = plan_run(options, place.world_size)
        with answering(partial(whereabouts.told, place.rank)):
            result = train(plan, place, whereabouts, heart.leave)
    except RunStopped:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, UsageError):
            heart.give_up(str(error))
            raise
        _end_failed_rank(place, whereabouts, heart, error)
    if place.is_first:
        _hand_back(result, options)
    return 0


def _hand_back(result: "RunResult", options: TrainOptions) -> None:
    if options.json is not None:
        result.write(options.json)
    print(result.line(), flush=True)


def _heart_of(options: TrainOptions, place: Place, whereabouts: Whereabouts) -> Heart:
    """The heart of this rank; who listens to whom is a table of `heartbeat`."""
    launched = os.environ.get(LAUNCHED_VARIABLE)
    limit_s = options.heartbeat_limit_s
    is_one_machine = place.local_world_size == place.world_size
    start_limit_s = limit_s if is_one_machine else max(limit_s, GROUP_TIMEOUT.total_seconds())

    def open_board() -> Board:
        if launched is not None:
            return FolderBoard(Path(launched))
        return board_of_store(os.environ, place.rank, start_limit_s)

    listens_to = range(1, place.world_size) if place.is_first else [0]
    return Heart(
        place.rank,
        whereabouts,
        open_board,
        [] if launched is not None else listens_to,
        Silence(limit_s, start_limit_s, started_s=time.monotonic()),
    )


def _end_failed_rank(
    place: Place, whereabouts: Whereabouts, heart: Heart, error: BaseException
) -> NoReturn:
    """Tell the error and end the process at once: an orderly end would wait for threads that wait
    for dead peers.
    """
    doing, others = whereabouts.doing, ""
    # Another rank's death is told by one line: where this rank stood then is no trace of its cause.
    if heart.verdict:
        others = f"; {heart.verdict}"
    elif not isinstance(error, CommunicationError):
        traceback.print_exception(error)
    elif LAUNCHED_VARIABLE not in os.environ and (
        standing := heart.whereabouts_of_others(place.world_size)
    ):
        others = f"; of the others, {standing}"
    heart.end(f"rank {place.rank} failed {doing}: {type(error).__name__}: {error}{others}")
