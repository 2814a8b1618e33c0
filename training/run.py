"""The parts of a run on one rank, built from its plan."""

from dataclasses import dataclass

import torch

from .data import Share
from .engines import Engine, engine_for
from .launch.ranks import Place
from .model import build_model, model_config
from .plan import Plan
from .stopping import Stopping


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run on one rank."""

    plan: Plan
    place: Place
    share: Share
    device: torch.device
    engine: Engine
    num_parameters: int
    stopping: Stopping


def build_run(plan: Plan, place: Place, device: torch.device) -> Run:
    """Make the model and shard it; every rank calls this."""
    options = plan.options
    config = model_config(options.model, context=options.seq_len, dropout=options.dropout)
    model = build_model(config, options.seed).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = engine_for(options, model, device)
    share = Share(options.batch, options.accumulate, place.rank, place.world_size)
    stopping = Stopping(place, device, can_save=options.checkpoint is not None)
    return Run(plan, place, share, device, engine, num_parameters, stopping)
