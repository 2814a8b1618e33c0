"""What is known of a run before any rank starts: its options, its data, the checkpoint it goes on
from.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

from . import checkpoints
from .data import Corpus, Share, load_corpus
from .engines import replicas_of
from .errors import OptionsError
from .measures.json_lines import require_no_metrics
from .measures.writers import require_no_events
from .options import TrainOptions
from .paths import require_writable_file, require_writable_folder, require_writable_place
from .schedule_options import batch_schedule_of, schedule_of
from .schedules import MicrobatchCalculator
from .step_file import SavedRun


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known about a run before any rank starts."""

    options: TrainOptions
    corpus: Corpus
    resume_from: SavedRun | None

    @property
    def first_step(self) -> int:
        """Number of the first step to run; steps count from 1."""
        return 1 if self.resume_from is None else self.resume_from.step + 1

    def batches(self, world_size: int) -> MicrobatchCalculator:
        """How the batch of each step is cut into microbatches, each of as many sequences as those
        of `options.batch` have.

        Raises:
            OptionsError: the ramp cannot be read, or none of its sizes can be cut so.
        """
        options = self.options
        whole = Share(options.batch, options.accumulate, 0, world_size)
        schedule = batch_schedule_of(options)
        with _told_with_the_microbatch(whole):
            return MicrobatchCalculator(
                schedule=schedule,
                micro_batch_size=whole.sequences_per_microbatch,
                data_parallel_size=world_size,
            )

    @property
    def defining(self) -> dict[str, str | int | float]:
        """What a checkpoint must agree in to be resumed."""
        return {**self.options.defining(), "data_sha256": self.corpus.sha256}


def plan_run(options: TrainOptions, world_size: int) -> Plan:
    """Check everything that needs no rank: the data, the batch, the checkpoints.

    Raises:
        UsageError: the data cannot be used, the ranks cannot share the batch, or the checkpoints
        do not fit the run.
    """
    schedule_of(options)
    if options.inject_fault_rank >= world_size:
        raise OptionsError(
            f"expected --inject-fault-rank below {world_size}, got {options.inject_fault_rank}; "
            "ranks count from 0"
        )
    replicas_of(options).check(world_size)
    _require_outputs(options)
    plan = Plan(options, load_corpus(options.data, seq_len=options.seq_len), None)
    _require_batches(plan, world_size)
    if options.attributes_faults and options.checkpoint is None:
        raise OptionsError(
            "expected --checkpoint DIR beside --inject-fault where another launcher starts the "
            "ranks, got none; say where to keep a step that has to be run on other hardware"
        )
    if options.checkpoint is None:
        return plan
    if not options.resume:
        checkpoints.refuse_to_mix(options.checkpoint)
        require_writable_place(options.checkpoint, "--checkpoint")
        return plan
    saved = checkpoints.checkpoint_to_resume(options.checkpoint, plan.defining, options.steps)
    require_writable_place(options.checkpoint, "--checkpoint")
    return replace(plan, resume_from=saved)


def _require_outputs(options: TrainOptions) -> None:
    """Refuse places where figures cannot be written, or another run's are."""
    for path, name in ((options.json, "--json"), (options.metrics, "--metrics")):
        if path is not None:
            require_writable_file(path, name)
    if options.metrics is not None:
        if options.json is not None and os.path.realpath(options.json) == os.path.realpath(
            options.metrics
        ):
            raise OptionsError(
                f"expected another file for --json than for --metrics, got {options.json} for "
                "both; name two"
            )
        if not options.resume:
            require_no_metrics(options.metrics)
    if options.tensorboard is not None:
        if find_spec("tensorboard") is None:
            raise OptionsError(
                f"expected TensorBoard to write {options.tensorboard}, got none; pip install "
                "'sidestream[tensorboard]'"
            )
        require_writable_folder(options.tensorboard, "--tensorboard")
        if not options.resume:
            require_no_events(options.tensorboard)


def _require_batches(plan: Plan, world_size: int) -> None:
    """Refuse sizes that the run would come to and that its ranks cannot share."""
    options = plan.options
    batches = plan.batches(world_size)
    with _told_with_the_microbatch(Share(options.batch, options.accumulate, 0, world_size)):
        for phase in batches.schedule.begun():
            if phase.step > options.steps:
                break
            batches.at(phase.consumed_samples)


@contextmanager
def _told_with_the_microbatch(whole: Share) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise OptionsError(
            f"--batch-ramp: {error}; a microbatch of a rank has --batch / (--accumulate x ranks) = "
            f"{whole.batch} / ({whole.accumulate} x {whole.world_size}) sequences, so --accumulate "
            "makes it smaller"
        ) from error
