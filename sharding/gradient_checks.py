"""Whether gradients were finite and of a usual size: seen on the device, read late.

    in an exchange      the largest magnitude of each tensor's gradient on this rank is noted
    after it            beside that of the sum; maxima over all ranks, on their way to the host
    after the next one  the host reads them; on a CPU, where nothing is on its way, at once

So the host never waits for the exchange it has just started, and all ranks read the same numbers at
the same place.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.optim.norm_op import largest_magnitudes
from ..kernels.optim.norm_reference import INFINITY_BITS
from .fully_shard import runtime_of
from .messages import listed
from .optim.nonfinite import nonfinite_error
from .runtime import Runtime
from .unit import Unit

_logger = logging.getLogger("sidestream")
CHECKS = RAISES, WARNS = "check_for_nan_in_grad", "check_for_large_grads"
LARGE = 10.0
"""How many times the largest magnitude before counts as large."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """What exchange `number` brought: bits of magnitudes [2, tensors], of own gradients and of
    sums. `found`: maxima over all ranks, on the host once `event` has come.
    """

    number: int
    own: Tensor
    found: Tensor
    event: torch.cuda.Event | None


class GradientChecks:
    """Called after each exchange of a runtime, on all ranks alike."""

    def __init__(
        self, runtime: Runtime, wanted: Collection[str], *, is_late: bool | None = None
    ) -> None:
        """wanted: `RAISES` for gradients that are not finite, `WARNS` of large ones. is_late: read
        what an exchange brought after the next one (None: on a GPU).
        """
        self._wanted = wanted
        self._on_gpu = runtime.pool.device.type == "cuda"
        self._is_late = self._on_gpu if is_late is None else is_late
        self._names: list[str] = []
        for unit in runtime.units:
            if unit.reduction.own_gradients is None:
                unit.reduction.note_own_gradients()
            self._names += [unit.spec.names[index] for index in unit.spec.layout.order]
        self._usual = torch.zeros(len(self._names))
        self._noted: _Noted | None = None

    def __call__(self, runtime: Runtime) -> None:
        """Gradients have been exchanged.

        Raises:
            NonFiniteGradientError: some were not finite, perhaps those of the exchange before.
        """
        before, self._noted = self._noted, self._note(runtime)
        if not self._is_late:
            before, self._noted = self._noted, None
        if before is not None:
            self._read(before, runtime)

    def _note(self, runtime: Runtime) -> _Noted:
        makers = (_own_magnitudes, _magnitudes_of_sums)
        own = torch.stack([torch.cat([*map(make, runtime.units)]) for make in makers])
        found = own.clone()
        runtime.collectives.all_reduce(found, dist.ReduceOp.MAX, "check of the gradients")
        event = None
        if self._on_gpu:
            host = torch.empty_like(found, device="cpu", pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _Noted(runtime.exchange_order.backwards, own, found, event)

    def _read(self, noted: _Noted, runtime: Runtime) -> None:
        if noted.event is not None:
            noted.event.synchronize()  # of an exchange ago
        largest, bad = noted.found.amax(0), (noted.found >= INFINITY_BITS).any(0)
        if RAISES in self._wanted and bad.any():
            own = self._names_where(noted.own[0] >= INFINITY_BITS)
            summed = self._names_where(bad)
            raise nonfinite_error(runtime, summed, own, f"exchange {noted.number}", noted.number)
        if WARNS in self._wanted:
            self._compare(noted.number, largest.view(torch.float32), runtime.collectives.rank)

    def _names_where(self, flags: Tensor) -> list[str]:
        return [name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag]

    def _compare(self, number: int, largest: Tensor, rank: int) -> None:
        is_large = (self._usual > 0) & largest.isfinite() & (largest > LARGE * self._usual)
        if rank == 0 and is_large.any():
            found = [
                f"'{self._names[at]}' ({largest[at]:.3g}, {self._usual[at]:.3g} before)"
                for at in is_large.nonzero().flatten()
            ]
            _logger.warning(
                "exchange %d: gradients are more than %g times as large as ever before: %s; look "
                "at the batch, or clip",
                number,
                LARGE,
                listed(found),
            )
        self._usual = torch.maximum(self._usual, largest.nan_to_num(0, 0, 0))


def largest_own_gradient(module: nn.Module) -> Tensor | None:
    """The largest magnitude among this rank's own gradients in the last exchange of a sharded
    module, before they were summed over ranks: FP32 of no dimension where they are, NaN if one is
    that. No collective, and no host waits. None where nobody notes them, as with
    `MixedPrecisionPolicy(nonfinite_grads="keep")`.

    Raises:
        ValueError: `module` is not the one passed to `fully_shard`.
    """
    every = [unit.reduction.own_gradients for unit in runtime_of(module).units]
    noted = [own.largest() for own in every if own is not None]
    return torch.cat(noted).max().view(torch.float32) if noted else None


def _own_magnitudes(unit: Unit) -> Tensor:
    assert unit.reduction.own_gradients is not None, "they are noted from the start"
    return unit.reduction.own_gradients.largest()


def _magnitudes_of_sums(unit: Unit) -> Tensor:
    """Of what this rank answers for, tensor by tensor, as they lie."""
    layout, flat = unit.spec.layout, unit.gradients.main_grad
    parts: list[list[Tensor]] = []
    for index in layout.order:
        start, stop = layout.overlap(index, unit.owned_span)
        base = layout.segments[index].start - unit.main_span[0]
        parts.append([flat[base + start : base + stop]] if flat is not None else [])
    return largest_magnitudes(parts, unit.main.device)
