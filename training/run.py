"""The parts of a run on one rank, built from its plan."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attribution import machine_for
from .batches import Draws, Microbatch, draws_of
from .engines import Engine, engine_for
from .launch.ranks import Place
from .launch.relaunching import TEMPORARY_VARIABLE
from .measured import Measures
from .model import build_model, model_config
from .passes import forward_backward_of
from .plan import Plan
from .rerun import RerunStateMachine
from .schedule_options import schedule_of
from .schedules import MicrobatchCalculator, OptimizerParamScheduler
from .stopping import Stopping


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run on one rank. forward_backward: see `passes`."""

    plan: Plan
    place: Place
    device: torch.device
    engine: Engine
    scheduler: OptimizerParamScheduler
    batches: MicrobatchCalculator
    draws: Draws
    forward_backward: Callable[[Sequence[Microbatch]], Tensor]
    measures: Measures
    num_parameters: int
    stopping: Stopping
    machine: RerunStateMachine | None


def build_run(plan: Plan, place: Place, device: torch.device, measures: Measures) -> Run:
    """Make the model and shard it; every rank calls this."""
    options = plan.options
    config = model_config(options.model, context=options.seq_len, dropout=options.dropout)
    model = build_model(config, options.seed).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = engine_for(options, model, device)
    can_be_resumed = options.checkpoint is not None and TEMPORARY_VARIABLE not in os.environ
    return Run(
        plan=plan,
        place=place,
        device=device,
        engine=engine,
        scheduler=OptimizerParamScheduler.of(engine.optimizer, schedule_of(options)),
        batches=plan.batches(place.world_size),
        draws=draws_of(options, plan.corpus),
        forward_backward=forward_backward_of(options, engine, measures.timers),
        measures=measures,
        num_parameters=num_parameters,
        stopping=Stopping(place, device, can_save=can_be_resumed),
        machine=machine_for(plan, engine),
    )
