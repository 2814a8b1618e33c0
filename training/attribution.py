"""Fault attribution in `sidestream train`: what is validated, which faults are injected, and how a
step ends whose results were rejected.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .engines import Engine
from .errors import CheckpointError
from .plan import Plan
from .rerun import RerunStateMachine, fault_here, has_open_question

LARGE = 10.0
"""A loss so many times the largest of the first 100 steps is rejected."""


def machine_for(plan: Plan, engine: Engine) -> RerunStateMachine | None:
    """The machine of a run, None where it attributes no faults; every rank calls this."""
    options = plan.options
    if not options.attributes_faults:
        return None
    injector = None
    if options.inject_fault is not None:
        at = options.inject_fault_at or max(1, options.steps // 2)
        injector = fault_here(options.inject_fault, at, options.inject_fault_rank)
    return RerunStateMachine(
        engine.module,
        program=json.dumps(dict(plan.defining), sort_keys=True),
        injector=injector,
        first_step=plan.first_step,
    )


def run_validated(
    machine: RerunStateMachine | None,
    forward_backward: Callable[[], Tensor],
    own_gradient: Callable[[], Tensor | None],
) -> Tensor:
    """Return what `forward_backward` does, the losses of this rank's microbatches, whose sum is
    validated, as is the largest of the rank's own gradients; it runs again where one of the two is
    rejected. Gradients have been cleared.
    """
    if machine is None:
        return forward_backward()
    losses = torch.empty(0)
    while machine.should_run_forward_backward():
        losses = forward_backward()
        # The sum: what one microbatch has of it changes with their number, in a ramp of the batch.
        machine.validate_result(
            losses.sum(),
            lambda loss: machine.is_unexpectedly_large(loss, LARGE, "loss"),
            "loss of the rank",
        )
        largest = own_gradient()
        if largest is not None:
            machine.validate_result(largest, _is_nonfinite, "largest gradient of the rank")
    return losses


def _is_nonfinite(value: Tensor) -> Tensor:
    return ~value.isfinite()


def extra_of(step: int, machine: RerunStateMachine | None) -> dict[str, Any]:
    """What a checkpoint holds beside the model and the optimizer; each rank's own."""
    return {"step": step, "rerun": None if machine is None else machine.state_dict()}


def resume(
    machine: RerunStateMachine | None, extra: Mapping[str, Any], *, same_ranks: bool
) -> None:
    """Have `machine` go on where the one was that is saved in `extra`.

    Raises:
        CheckpointError: a step waits there to be run on other hardware, and cannot be; or it is no
            such state.
    """
    state = extra.get("rerun")
    if state is None:
        return
    try:
        is_open = has_open_question(state)
        if machine is not None and (is_open or same_ranks):
            machine.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if machine is None and is_open:
        raise CheckpointError(
            "expected --rerun for a checkpoint with a step that has to be run on other hardware, "
            "got none; pass --rerun, or move the checkpoint away to resume from an older one"
        )
