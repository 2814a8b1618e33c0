"""What a run measures of itself: regions of its steps, joules; and where its figures go."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from .launch.ranks import Place
from .measures import (
    Energy,
    EnergyMonitor,
    JsonLinesWriter,
    MetricsWriter,
    SeveralWriters,
    TensorBoardWriter,
    Timers,
)
from .plan import Plan

REGION_LEVEL = 1
"""Log level of the regions of a step: measured where they are asked for."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one rank; `energy` is None where nobody asked for it. The first rank's figures are
    written.
    """

    timers: Timers
    energy: EnergyMonitor | None
    writer: MetricsWriter

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no energy is counted."""
        if self.energy is None:
            yield
            return
        self.energy.pause()
        yield
        self.energy.resume()

    def begin(self) -> None:
        """Leave what was used until now, by building and loading, out of what steps use."""
        if self.energy is not None:
            self.energy.lap()

    def keep_up(self) -> None:
        """To be called each step: a counter of energy that comes round has to be read in time."""
        if self.energy is not None:
            self.energy.keep_up()

    def energy_over_ranks(self) -> Energy | None:
        """What all ranks used in their steps; every rank calls this."""
        return None if self.energy is None else self.energy.lap_over_ranks()


@contextmanager
def measuring(plan: Plan, place: Place, device: torch.device) -> Iterator[Measures]:
    """Give the measures that the options ask for, and end them.

    Raises:
        UsageError: figures of another run lie where these are to be written, or they cannot be.
    """
    options = plan.options
    resumed_step = plan.first_step - 1 if options.resume else None
    with ExitStack() as opened:
        writers: list[MetricsWriter] = []
        if options.metrics is not None and place.is_first:
            writers.append(JsonLinesWriter(options.metrics, resumed_step=resumed_step))
        if options.tensorboard is not None and place.is_first:
            writers.append(TensorBoardWriter(options.tensorboard, resumed_step=resumed_step))
        writer = SeveralWriters(writers)
        opened.callback(writer.close)
        energy = EnergyMonitor(device, local_rank=place.local_rank) if options.energy else None
        if energy is not None:
            energy.setup()
            opened.callback(energy.shutdown)
        timers = Timers(log_level=REGION_LEVEL if options.timers else 0, device=device)
        yield Measures(timers, energy, writer)
