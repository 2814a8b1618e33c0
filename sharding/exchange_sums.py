"""An exchange of gradients outside backward: of what ranks have added up under `no_sync`."""

from __future__ import annotations

import time
import weakref

from .backward_pass import BackwardPass
from .runtime import Runtime


def exchange_sums(runtime: Runtime) -> None:
    """Exchange the gradients that wait, as a backward outside `no_sync` would have (a collective,
    if there are any). All ranks must have as many backwards behind them.

    Raises:
        RuntimeError: a backward runs.
        CommunicationError: a rank is gone.
    """
    if not any(unit.gradients.has_unreduced_sum for unit in runtime.units):
        return
    if runtime.runs_backward:
        raise RuntimeError(
            "finish_grad_sync: expected no backward to run, got a call from inside one; call it "
            "after the last backward of a step"
        )
    order = runtime.exchange_order
    backward = BackwardPass(
        units=runtime.units,
        order=order.indices,
        lane=runtime.lanes[1],
        trace=runtime.trace,
        sync=True,
        number=order.backwards,
        callback=weakref.ref(_no_engine),
        creates_graph=False,
        allowed_exchanges=0,
    )
    try:
        backward.finish()
    except BaseException:
        backward.abandon(time.monotonic())
        for unit in runtime.units:
            unit.reduction.drop()
        raise
    order.backwards += 1
    runtime.pool.trim()
    runtime.after_exchanges(runtime)


def _no_engine() -> None:
    """What no engine holds: nobody asks whether it is gone."""
