"""One rank's training run: builds model and optimizer, shards them, steps, saves and sums up.

plan -> run -> [ step (`steps`) -> record -> checkpoint -> fault ] x steps -> result
"""

import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from ..sharding import NonFiniteGradientError, full_state_dict
from .data import MIB
from .errors import RunStopped
from .launch.exit_codes import RESUME_TO_DISAMBIGUATE
from .launch.heartbeat import Whereabouts
from .launch.ranks import (
    Place,
    choose_device,
    joined_group,
    max_over_ranks,
    wait_for_all,
)
from .measured import measuring
from .measures import Energy
from .options import TrainOptions
from .plan import Plan
from .progress import Reporter, reporter_for
from .recorder import Recorder
from .rerun import ExitDecision
from .result import RunResult, peak_memory_mib, reserved_memory_mib, sha256_of
from .run import Run, build_run
from .saving import is_save_due, load_run, refuse_nonfinite, save_run
from .steps import held_out_loss, train_step


def train(
    plan: Plan,
    place: Place,
    whereabouts: Whereabouts | None = None,
    leave: Callable[[], None] = lambda: None,
) -> RunResult:
    """Run all steps on this rank; every rank calls this and gets the same result.

    `whereabouts` is kept up to date; `leave` is called once ranks may end one before another.

    Raises:
        OptionsError: the ranks have not enough GPUs.
        CheckpointError: what was loaded is not of the step that it lies under.
        NonFiniteGradientError, NonFiniteRunError: something is NaN or infinite, and that ends it.
        RunStopped: SIGTERM came, in a run with checkpoints, and the last step is saved; or a
            result was rejected.
    """
    options = plan.options
    whereabouts = whereabouts or Whereabouts()
    choice = choose_device(options.device, place.local_world_size)
    with (
        joined_group(place, choice, alone_too=options.use_torch_fsdp2) as device,
        reporter_for(
            is_first=place.is_first, first_step=plan.first_step, last_step=options.steps
        ) as reporter,
        measuring(plan, place, device) as measures,
    ):
        run = build_run(plan, place, device, measures)
        whereabouts.explanation = run.engine.explanation
        _introduce(run, reporter, choice.reason)
        recorder = Recorder(reporter, device, measures.writer)
        if plan.resume_from is not None:
            whereabouts.doing = f"loading step {plan.resume_from.step}"
            load_run(run, plan.resume_from, recorder)
        measures.begin()
        with run.stopping.listening():
            stopped = _train_steps(run, recorder, whereabouts)
            whereabouts.doing = "summing up"
            recorder.flush()
            refuse_nonfinite(options, recorder)
            energy = measures.energy_over_ranks()
            _tell_measures(run, recorder, energy)
            result = None if stopped else _sum_up(run, recorder, energy)
            if stopped:  # told first: torchrun ends the others as soon as one has left
                reporter.note(str(stopped))
            leave()
            wait_for_all("at the end of the run")
            run.forward_backward.reset()
    if stopped:
        raise stopped
    assert result is not None, "a run that was not stopped has one"
    return result


def _train_steps(run: Run, recorder: Recorder, whereabouts: Whereabouts) -> RunStopped | None:
    """Train and save; return why the run has to stop before its last step, where it has to."""
    options, stopping = run.plan.options, run.stopping
    for step in range(run.plan.first_step, options.steps + 1):
        whereabouts.doing = f"in step {step}"
        try:
            decision = train_step(run, step, recorder)
        except NonFiniteGradientError:
            recorder.show_passed()  # the figures before it
            raise
        run.measures.keep_up()
        if decision.exit:
            return _stop_on_rejection(run, step, decision, recorder, whereabouts)
        has_to_stop = stopping.is_agreed()
        if has_to_stop or is_save_due(options, step):
            whereabouts.doing = f"saving step {step}"
            with run.measures.pause():
                save_run(run, step, recorder)
            has_to_stop = stopping.is_agreed_now()
        _kill_if_due(run, step)
        if has_to_stop and step < options.steps:
            return RunStopped(
                f"stopped by SIGTERM after step {step} of {options.steps}, which is saved; "
                "--resume goes on from there"
            )
    return None


def _stop_on_rejection(
    run: Run, step: int, decision: ExitDecision, recorder: Recorder, whereabouts: Whereabouts
) -> RunStopped:
    """Save what there was before `step`, in which a result was rejected."""
    if decision.checkpoint:
        whereabouts.doing = f"saving step {step - 1}"
        with run.measures.pause():
            save_run(run, step - 1, recorder)
    if decision.code == RESUME_TO_DISAMBIGUATE:
        text = f"step {step} has to be run on other hardware, which --resume does"
        return RunStopped(text, decision.code)
    assert run.machine is not None and run.machine.verdict is not None, "it is known what it was"
    return RunStopped(run.machine.verdict.line(), decision.code)


def _introduce(run: Run, reporter: Reporter, device_reason: str) -> None:
    options, corpus, place = run.plan.options, run.plan.corpus, run.place
    reporter.note(
        f"data: {corpus.num_bytes / MIB:.1f} MiB in {corpus.num_files} files from {corpus.source}"
    )
    reporter.note(
        f"model: {options.model}, {run.num_parameters:,} parameters; {_ranks(place.world_size)} "
        f"{_in_replicas(options)}on {run.device.type} ({device_reason}); {run.engine.described}"
    )
    remarks = (run.draws.described, *run.engine.remarks, run.forward_backward.remark)
    for remark in filter(None, remarks):
        reporter.note(remark)
    saved = run.plan.resume_from
    if saved is not None:
        reporter.note(f"resuming after step {saved.step} from {saved.path}")
        if saved.world_size != place.world_size:
            reporter.note(
                f"saved by {_ranks(saved.world_size)}: the same data, but sums in another order, "
                "so not the same bits"
            )


def _kill_if_due(run: Run, step: int) -> None:
    options = run.plan.options
    if step != options.kill_at_step or options.kill_rank not in (None, run.place.rank):
        return
    print(f"rank {run.place.rank} kills itself after step {step} (--kill-at-step)", flush=True)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _tell_measures(run: Run, recorder: Recorder, energy: Energy | None) -> None:
    """Every rank calls this: times are those of all; a run that ends in its first step has none."""
    note = recorder.reporter.note
    if not recorder.num_steps:
        return
    if run.plan.options.timers:
        timings = run.measures.timers.gather()
        last_step = run.plan.first_step - 1 + recorder.num_steps
        timings.write(run.measures.writer, last_step, recorder.num_steps)
        for line in (*timings.lines(recorder.num_steps), *map(str, timings.stragglers())):
            note(line)
    if energy is not None:
        per_step, per_token = energy.per(recorder.num_steps), energy.per(recorder.tokens)
        note(
            f"energy: {energy}"
            if per_step is None
            else f"energy: {energy}, {per_step:.4g} J a step, {per_token:.4g} J a token"
        )


def _sum_up(run: Run, recorder: Recorder, energy: Energy | None) -> RunResult:
    options = run.plan.options
    assert recorder.loss_first is not None, "at least one step was run"
    peak_mib = max_over_ranks(peak_memory_mib(run.device), "peak memory", run.device)
    reserved_mib = reserved_memory_mib(run.device)
    if reserved_mib is not None:
        reserved_mib = round(max_over_ranks(reserved_mib, "reserved memory", run.device), 1)
    return RunResult(
        loss_first=recorder.loss_first,
        loss_last=recorder.loss_last,
        loss_held_out=held_out_loss(run),
        tokens_per_s=round(recorder.tokens_per_s, 1),
        step_ms_median=round(recorder.step_ms_median, 3),
        peak_mib=round(peak_mib, 1),
        reserved_mib=reserved_mib,
        params_sha256=_fingerprint(run),
        world=run.place.world_size,
        zero=options.zero,
        seed=options.seed,
        steps=options.steps,
        first_step=run.plan.first_step,
        compute=options.compute,
        grad_wire=options.grad_wire,
        param_wire=options.param_wire,
        model=options.model,
        num_parameters=run.num_parameters,
        device=_device_name(run.device),
        wire_bytes_per_step=run.engine.sent_bytes_per_step,
        use_torch_fsdp2=options.use_torch_fsdp2,
        joules_per_step=None if energy is None else energy.per(recorder.num_steps),
        joules_per_token=None if energy is None else energy.per(recorder.tokens),
        torch=torch.__version__,
        triton=_triton_version(),
    )


def _fingerprint(run: Run) -> str:
    """Gather the full parameters (every rank takes part) and hash them where they arrived."""
    parameters = full_state_dict(run.engine.module)
    return sha256_of(parameters) if run.place.is_first else ""


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _in_replicas(options: TrainOptions) -> str:
    return "" if options.dp_outer == 1 else f"in {options.dp_outer} replicas "


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
