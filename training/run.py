"""The parts of a run on one rank, built from its plan."""

from dataclasses import dataclass

import torch

from .attribution import machine_for
from .batches import Draws, draws_of
from .engines import Engine, engine_for
from .launch.ranks import Place
from .measured import Measures
from .model import build_model, model_config
from .passes import ForwardBackward, forward_backward_of
from .plan import Plan
from .rerun import RerunStateMachine
from .schedules import MicrobatchCalculator, OptimizerParamScheduler
from .schedules.options import schedule_of
from .stopping import Stopping


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run on one rank."""

    plan: Plan
    place: Place
    device: torch.device
    engine: Engine
    scheduler: OptimizerParamScheduler
    batches: MicrobatchCalculator
    draws: Draws
    forward_backward: ForwardBackward
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
    return Run(
        plan,
        place,
        device,
        engine,
        OptimizerParamScheduler.of(engine.optimizer, schedule_of(options)),
        plan.batches(place.world_size),
        draws_of(options, plan.corpus),
        forward_backward_of(options, engine, measures.timers),
        measures,
        num_parameters,
        Stopping(place, device, can_save=options.checkpoint is not None),
        machine_for(plan, engine),
    )
