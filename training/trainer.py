"""One rank's training run: builds model and optimizer, shards them, steps, saves and sums up.

    step k:  learning rate -> accumulate x (forward, backward) -> clip -> AdamW
             -> mean loss -> checkpoint -> fault

Step k draws its batch and its random numbers from (seed, k), so a resumed run needs the step, not
a generator's state.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from reprlib import repr as short

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..sharding import full_state_dict, load_checkpoint, save_checkpoint
from . import checkpoints
from .data import MIB, Corpus, Share, draw_batch, held_out_batch, load_corpus, mix_seed, sent_to
from .engines import Engine, engine_for, replicas_of
from .errors import CheckpointError
from .launch.heartbeat import Whereabouts
from .launch.ranks import (
    Place,
    choose_device,
    joined_group,
    max_over_ranks,
    mean_over_ranks,
    wait_for_all,
)
from .model import VOCAB_SIZE, build_model, model_config
from .optimization import learning_rate
from .options import TrainOptions
from .paths import require_writable_file, require_writable_folder
from .progress import Reporter, reporter_for
from .recorder import Recorder
from .result import RunResult, peak_memory_mib, reserved_memory_mib, sha256_of
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


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run on one rank."""

    plan: Plan
    place: Place
    share: Share
    device: torch.device
    engine: Engine
    num_parameters: int


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
    """
    options = plan.options
    whereabouts = whereabouts or Whereabouts()
    choice = choose_device(options.device, place.local_world_size)
    with (
        joined_group(place, choice, alone_too=options.use_torch_fsdp2) as device,
        reporter_for(
            is_first=place.is_first, first_step=plan.first_step, last_step=options.steps
        ) as reporter,
    ):
        run = _build(plan, place, device)
        whereabouts.explanation = run.engine.explanation
        _introduce(run, reporter, choice.reason)
        recorder = Recorder(reporter, device, options.batch * options.seq_len)
        if plan.resume_from is not None:
            whereabouts.doing = f"loading step {plan.resume_from.step}"
            _load(run, plan.resume_from, recorder)
        for step in range(plan.first_step, options.steps + 1):
            whereabouts.doing = f"in step {step}"
            recorder.finish_step(step, _train_step(run, step))
            if _is_save_due(options, step):
                whereabouts.doing = f"saving step {step}"
                _save(run, step, recorder)
            _kill_if_due(run, step)
        whereabouts.doing = "summing up"
        recorder.flush()
        result = _sum_up(run, recorder)
        leave()
        wait_for_all("at the end of the run")
        return result


def _build(plan: Plan, place: Place, device: torch.device) -> Run:
    options = plan.options
    config = model_config(options.model, context=options.seq_len, dropout=options.dropout)
    model = build_model(config, options.seed).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = engine_for(options, model, device)
    share = Share(options.batch, options.accumulate, place.rank, place.world_size)
    return Run(plan, place, share, device, engine, num_parameters)


def _introduce(run: Run, reporter: Reporter, device_reason: str) -> None:
    options, corpus, place = run.plan.options, run.plan.corpus, run.place
    reporter.note(
        f"data: {corpus.num_bytes / MIB:.1f} MiB in {corpus.num_files} files from {corpus.source}"
    )
    reporter.note(
        f"model: {options.model}, {run.num_parameters:,} parameters; {_ranks(place.world_size)} "
        f"{_in_replicas(options)}on {run.device.type} ({device_reason}); {run.engine.described}"
    )
    for remark in run.engine.remarks:
        reporter.note(remark)
    saved = run.plan.resume_from
    if saved is not None:
        reporter.note(f"resuming after step {saved.step} from {saved.path}")
        if saved.world_size != place.world_size:
            reporter.note(
                f"saved by {_ranks(saved.world_size)}: the same data, but sums in another order, "
                "so not the same bits"
            )


def _train_step(run: Run, step: int) -> Tensor:
    options = run.plan.options
    torch.manual_seed(mix_seed(options.seed, step, run.place.rank))
    for group in run.engine.optimizer.param_groups:
        group["lr"] = learning_rate(step, total_steps=options.steps, peak=options.lr)
    total = torch.zeros((), device=run.device)
    for microbatch in range(options.accumulate):
        tokens = draw_batch(
            run.plan.corpus,
            run.share,
            seed=options.seed,
            step=step,
            microbatch=microbatch,
            seq_len=options.seq_len,
        )
        tokens = sent_to(run.device, tokens)
        is_last = microbatch == options.accumulate - 1
        with nullcontext() if is_last else run.engine.no_sync():
            loss = _loss(run.engine.module, tokens) / options.accumulate
            loss.backward()
        total += loss.detach()
    if options.clip > 0:
        run.engine.clip(options.clip)
    run.engine.optimizer.step()
    run.engine.optimizer.zero_grad()
    return mean_over_ranks(total, "loss")


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens[:, :-1])
    return F.cross_entropy(logits.float().reshape(-1, VOCAB_SIZE), tokens[:, 1:].reshape(-1))


def _held_out_loss(run: Run) -> float:
    tokens = held_out_batch(run.plan.corpus, run.share, seq_len=run.plan.options.seq_len).to(
        run.device
    )
    run.engine.module.eval()
    with torch.no_grad():
        loss = _loss(run.engine.module, tokens)
    run.engine.module.train()
    return float(mean_over_ranks(loss, "held-out loss").item())


def _load(run: Run, saved: SavedRun, recorder: Recorder) -> None:
    extra = load_checkpoint(saved.path, run.engine.module, run.engine.optimizer)
    if extra != _extra_of(saved.step):
        raise CheckpointError(
            f"expected the state after step {saved.step} in {saved.path}, got a checkpoint that "
            f"was saved with {short(extra)}; move it away to resume from an older one"
        )
    recorder.loss_first = saved.loss_first
    recorder.restart_clock()


def _extra_of(step: int) -> dict[str, int]:
    return {"step": step}


def _is_save_due(options: TrainOptions, step: int) -> bool:
    if options.checkpoint is None:
        return False
    return step == options.steps or step % (options.checkpoint_every or options.steps) == 0


def _save(run: Run, step: int, recorder: Recorder) -> None:
    options = run.plan.options
    recorder.flush()
    assert recorder.loss_first is not None, "a step has been recorded"
    assert options.checkpoint is not None, "a save is due"
    path = checkpoints.checkpoint_path(options.checkpoint, step)
    saved = SavedRun(path, step, run.place.world_size, recorder.loss_first, run.plan.defining)
    checkpoints.save_run(
        saved,
        lambda folder: save_checkpoint(
            folder, run.engine.module, run.engine.optimizer, extra=_extra_of(step)
        ),
        is_first=run.place.is_first,
        keep=options.keep_checkpoints,
    )
    recorder.reporter.note(f"saved {path}")
    recorder.restart_clock()


def _kill_if_due(run: Run, step: int) -> None:
    options = run.plan.options
    if step != options.kill_at_step or options.kill_rank not in (None, run.place.rank):
        return
    print(f"rank {run.place.rank} kills itself after step {step} (--kill-at-step)", flush=True)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _sum_up(run: Run, recorder: Recorder) -> RunResult:
    options = run.plan.options
    assert recorder.loss_first is not None, "at least one step was run"
    peak_mib = max_over_ranks(peak_memory_mib(run.device), "peak memory", run.device)
    reserved_mib = reserved_memory_mib(run.device)
    if reserved_mib is not None:
        reserved_mib = round(max_over_ranks(reserved_mib, "reserved memory", run.device), 1)
    return RunResult(
        loss_first=recorder.loss_first,
        loss_last=recorder.loss_last,
        loss_held_out=_held_out_loss(run),
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
