"""What is known of a run before any rank starts: its options, its data, the checkpoint it goes on
from.
"""

from dataclasses import dataclass, replace

from . import checkpoints
from .data import Corpus, Share, load_corpus
from .engines import replicas_of
from .errors import OptionsError
from .options import TrainOptions
from .paths import require_writable_file, require_writable_folder, require_writable_place
from .schedules import MicrobatchCalculator
from .schedules.options import batch_schedule_of, schedule_of
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
        try:
            return MicrobatchCalculator(
                schedule=schedule,
                micro_batch_size=whole.sequences_per_microbatch,
                data_parallel_size=world_size,
            )
        except ValueError as error:
            raise OptionsError(f"--batch-ramp: {error}") from error

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
    for path, name in ((options.json, "--json"), (options.metrics, "--metrics")):
        if path is not None:
            require_writable_file(path, name)
    if options.tensorboard is not None:
        require_writable_folder(options.tensorboard, "--tensorboard")
    plan = Plan(options, load_corpus(options.data, seq_len=options.seq_len), None)
    _require_batches(plan, world_size)
    if options.attributes_faults and options.checkpoint is None:
        raise OptionsError(
            "expected --checkpoint DIR beside --rerun in ranks that another launcher starts, got "
            "none; say where to keep a step that has to be run on other hardware"
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


def _require_batches(plan: Plan, world_size: int) -> None:
    """Refuse sizes that the run would come to and that its ranks cannot share."""
    batches = plan.batches(world_size)
    consumed = batches.consumed_before(plan.options.steps)
    for phase in batches.schedule.phases:
        if phase.first_sample <= consumed:
            try:
                batches.at(phase.first_sample)
            except ValueError as error:
                raise OptionsError(f"--batch-ramp: {error}") from error
