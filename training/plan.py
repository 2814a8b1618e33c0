"""What is known of a run before any rank starts: its options, its data, the checkpoint it goes on
from.
"""

from dataclasses import dataclass, replace

from . import checkpoints
from .data import Corpus, Share, load_corpus
from .engines import replicas_of
from .options import TrainOptions
from .paths import require_writable_file, require_writable_folder
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
    Share(options.batch, options.accumulate, 0, world_size)
    replicas_of(options).check(world_size)
    if options.json is not None:
        require_writable_file(options.json, "--json")
    plan = Plan(options, load_corpus(options.data, seq_len=options.seq_len), None)
    if options.checkpoint is None:
        return plan
    if not options.resume:
        checkpoints.refuse_to_mix(options.checkpoint)
        require_writable_folder(options.checkpoint, "--checkpoint")
        return plan
    saved = checkpoints.checkpoint_to_resume(options.checkpoint, plan.defining, options.steps)
    require_writable_folder(options.checkpoint, "--checkpoint")
    return replace(plan, resume_from=saved)
