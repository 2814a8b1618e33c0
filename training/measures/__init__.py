"""Measuring a run: timers of regions, joules, and the writers that figures go to.

from sidestream.training.measures import EnergyMonitor, JsonLinesWriter, Timers
"""

from .clocks import Clock, HostClock, StreamClock, clock_of
from .energy import Energy, EnergyMonitor, sum_over_ranks
from .energy_sources import EnergySource, NvmlSource, RaplSource
from .json_lines import JsonLinesWriter
from .timer import Timer
from .timers import Timers
from .timings import Reading, Straggler, Timings
from .writers import MetricsWriter, SeveralWriters, TensorBoardWriter

__all__ = [
    "Clock",
    "Energy",
    "EnergyMonitor",
    "EnergySource",
    "HostClock",
    "JsonLinesWriter",
    "MetricsWriter",
    "NvmlSource",
    "RaplSource",
    "Reading",
    "SeveralWriters",
    "Straggler",
    "StreamClock",
    "TensorBoardWriter",
    "Timer",
    "Timers",
    "Timings",
    "clock_of",
    "sum_over_ranks",
]
