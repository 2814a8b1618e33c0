"""A run's checkpoints: what is saved after a step, and what a resume brings back.

Batches, random numbers, learning rates and batch sizes follow from the number of the step. So what
is saved is the model, the optimizer's state, and what is known of rejected results.
"""

import math
from reprlib import repr as short

from ..sharding import load_checkpoint, save_checkpoint
from . import checkpoints
from .attribution import extra_of, resume
from .errors import CheckpointError, NonFiniteRunError
from .options import TrainOptions
from .recorder import Recorder
from .run import Run
from .step_file import SavedRun


def load_run(run: Run, saved: SavedRun, recorder: Recorder) -> None:
    """Bring back what `saved` holds; every rank calls this.

    Raises:
        CheckpointError: it is not of the step that it lies under.
    """
    extra = load_checkpoint(saved.path, run.engine.module, run.engine.optimizer)
    if not isinstance(extra, dict) or {**extra, "rerun": None} != extra_of(saved.step, None):
        raise CheckpointError(
            f"expected the state after step {saved.step} in {saved.path}, got a checkpoint that "
            f"was saved with {short(extra)}; move it away to resume from an older one"
        )
    resume(run.machine, extra, same_ranks=saved.world_size == run.place.world_size)
    recorder.loss_first = saved.loss_first if saved.step else None
    recorder.restart_clock()


def is_save_due(options: TrainOptions, step: int) -> bool:
    """Whether the run is saved after `step`."""
    if options.checkpoint is None:
        return False
    return step == options.steps or step % (options.checkpoint_every or options.steps) == 0


def save_run(run: Run, step: int, recorder: Recorder) -> None:
    """Save the run after `step`, 0 before the first one; every rank calls this.

    Raises:
        NonFiniteRunError: a loss or a gradient norm was not finite.
    """
    options = run.plan.options
    recorder.flush()
    assert options.checkpoint is not None, "a save is due"
    refuse_nonfinite(options, recorder)
    path = checkpoints.checkpoint_path(options.checkpoint, step)
    loss_first = math.nan if recorder.loss_first is None else recorder.loss_first
    saved = SavedRun(path, step, run.place.world_size, loss_first, run.plan.defining)
    checkpoints.save_run(
        saved,
        lambda folder: save_checkpoint(
            folder, run.engine.module, run.engine.optimizer, extra=extra_of(step, run.machine)
        ),
        is_first=run.place.is_first,
        keep=options.keep_checkpoints,
    )
    recorder.reporter.note(f"saved {path}")
    recorder.restart_clock()


def refuse_nonfinite(options: TrainOptions, recorder: Recorder) -> None:
    """End a run in which a step that was shown is not finite: FSDP2 looks at no gradient, and a
    loss may overflow where no gradient does.

    Raises:
        NonFiniteRunError: a loss or a gradient norm was not finite, and such a run has to end.
    """
    if recorder.first_nonfinite is not None and options.nonfinite_grads == "raise":
        raise NonFiniteRunError(
            f"expected finite losses and gradient norms, got one in step "
            f"{recorder.first_nonfinite} that is not, so nothing is saved; resume from an older "
            "checkpoint with a lower --lr, or pass --nonfinite-grads keep to save whatever comes"
        )
