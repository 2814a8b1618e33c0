"""What a step does when a gradient is NaN or infinite, decided alike by all ranks.

    MixedPrecisionPolicy(nonfinite_grads=...)    a step with such a gradient
    "keep"                                       is made; nothing is checked
    "raise"                                      raises `NonFiniteGradientError`, before it begins
    "skip"                                       is left out, with a warning, and counted

A check reads what this rank answers for of the summed gradients, as clipping does, and the host
reads one number, the maximum over all ranks. Whose gradient it was is asked only then.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...kernels.optim.norm_op import largest_magnitudes
from ...kernels.optim.norm_reference import INFINITY_BITS
from ..errors import NonFiniteGradientError
from ..messages import listed
from ..optimizer_view import FlatRun
from ..runtime import Runtime
from ..unit import Unit
from .flat_runs import owned_grad

_logger = logging.getLogger("sidestream")
_OTHERWISE = {
    "raise": ", or pass MixedPrecisionPolicy(nonfinite_grads='skip') to leave such steps out",
    "skip": "",
}
_SKIPPED: weakref.WeakKeyDictionary[Runtime, int] = weakref.WeakKeyDictionary()
Runs = Sequence[tuple[Unit, FlatRun]]


@dataclass(frozen=True, slots=True)
class _Found:
    """On `rank` of the job: tensors whose sum is not finite, those whose own gradient is not."""

    rank: int
    summed: tuple[str, ...]
    own: tuple[str, ...]


class FiniteSteps:
    """The steps of one optimizer, which go on or not by the policy of its model."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._made = 0
        self._begun = False  # the step that is under way has had finite gradients
        self._checked = False  # those that there are now
        self.loss: object = None
        """What the closure of the step that is under way has returned."""

    def check(self, optimizer: torch.optim.Optimizer, runtime: Runtime, runs: Runs) -> None:
        """`optimizer`'s step is about to read the gradients of `runs`, which are its own.

        Where a `torch.amp.GradScaler` hands its own finding to the step, that decides.

        Raises:
            NonFiniteGradientError: some are not finite; on every rank.
        """
        has_scaler = getattr(optimizer, "found_inf", None) is not None
        if self._policy == "keep" or self._checked or has_scaler:
            return
        if _is_nonfinite(runtime, runs):
            raise _error(runtime, runs, self._steps_made(optimizer))
        self._begun = self._checked = True

    def gradients_changed(self, loss: object) -> None:
        """The closure of a step has run and returned `loss`."""
        self._checked, self.loss = False, loss

    def leaves_out(
        self, error: NonFiniteGradientError, runtime: Runtime | None, runs: Runs
    ) -> bool:
        """Whether the step over `runs` that ended with `error` is as if it had not been called; if
        so, what the messages of its gradients have lost goes too.
        """
        if self._policy != "skip" or runtime is None:
            return False
        if self._begun:
            error.add_note(
                "nonfinite_grads='skip' does not leave this step out, because its closure was "
                "called again after the step had begun to change parameters"
            )
            return False
        _SKIPPED[runtime] = num_skipped(runtime) + 1
        for unit, run in runs:
            unit.reduction.reset_residual(run.indices)
        if runtime.collectives.rank == 0:
            _logger.warning("left out: %s", error)
        return True

    def end(self) -> None:
        """A step is over."""
        self._made += self._begun
        self._begun = self._checked = False
        self.loss = None

    def _steps_made(self, optimizer: torch.optim.Optimizer) -> int:
        """As its state says, which checkpoints bring along, or else since it was bound."""
        counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        return int(max(counts)) if counts else self._made


def num_skipped(runtime: Runtime) -> int:
    """How many steps of optimizers over its parameters were left out."""
    return _SKIPPED.get(runtime, 0)


def _is_nonfinite(runtime: Runtime, runs: Runs) -> bool:
    owned = [grad for unit, run in runs if (grad := owned_grad(unit, run)) is not None]
    largest = largest_magnitudes([owned], runtime.pool.device)
    runtime.collectives.all_reduce(largest, dist.ReduceOp.MAX, "check of the gradients")
    return int(largest) >= INFINITY_BITS


def _error(runtime: Runtime, runs: Runs, step: int) -> NonFiniteGradientError:
    summed = [name for unit, run in runs for name in _names_summed(unit, run)]
    own = [name for unit, run in runs for name in _names_own(unit, run)]
    fix = _OTHERWISE[runtime.options.nonfinite_grads]
    return nonfinite_error(runtime, summed, own, f"step after {step} others", step, fix)


def nonfinite_error(
    runtime: Runtime,
    summed: Sequence[str],
    own: Sequence[str],
    what: str,
    number: int,
    fix: str = "",
) -> NonFiniteGradientError:
    """What all ranks know about parameters whose sum, as far as this rank answers for it, or own
    gradient was not finite in `what`, which `number` counts (a collective).
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = runtime.collectives.gather_objects(_Found(rank, tuple(summed), tuple(own)))
    bad = {name for one in found for name in one.summed}
    names = [name for unit in runtime.units for name in unit.spec.names if name in bad]
    ranks = {name: tuple(one.rank for one in found if name in one.own) for name in names}
    text = f"{what}: expected finite gradients, got NaN or infinity in {_described(ranks)}"
    return NonFiniteGradientError(text + fix, ranks, number)


def _names_summed(unit: Unit, run: FlatRun) -> Iterable[str]:
    grad, layout = run.param.grad, unit.spec.layout
    for index in run.indices if grad is not None else ():
        start, stop = layout.overlap(index, unit.owned_span)
        base = layout.segments[index].start - unit.main_span[0] - run.start
        assert grad is not None
        if not torch.isfinite(grad[base + start : base + stop]).all():
            yield unit.spec.names[index]


def _names_own(unit: Unit, run: FlatRun) -> Iterable[str]:
    own = unit.reduction.own_gradients
    assert own is not None, "the policy of the model has them noted"
    return (unit.spec.names[index] for index in own.nonfinite() & set(run.indices))


def _described(ranks: Mapping[str, tuple[int, ...]]) -> str:
    """What was not finite, and what to do. ranks: whose own gradient was not finite, of each
    parameter whose sum is not.
    """
    if made := [f"'{name}' on {_on(whose)}" for name, whose in ranks.items() if whose]:
        return f"{listed(made)}; look at what was computed there, or lower the learning rate"
    return (
        f"the sum of {listed([repr(name) for name in ranks])}, though each rank's own gradient was "
        "finite: the sum or what it travels in overflowed, or the gradient was changed after "
        "backward; send gradients in a wider dtype, or scale the loss down"
    )


def _on(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed([str(r) for r in ranks])}"
