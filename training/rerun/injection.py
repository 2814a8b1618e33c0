"""Faults that are made on purpose, to see that they are found: which results are wrong, and when.

    transient     wrong once
    persistent    wrong on one piece of hardware, whenever the step is run there
    bug           wrong on all hardware

What is wrong is a pure function of where the machine is, so a run again is wrong as it should be.
"""

import math
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...sharding.arguments import require_count, require_one_of
from ..launch.relaunching import rotation_from
from .transitions import VerdictKind
from .validation import Result


@dataclass(frozen=True, slots=True)
class Moment:
    """A validation: the `call`-th of the step on a rank. is_first: the step was not run before."""

    step: int
    rank: int
    call: int
    hardware: str
    is_first: bool


class Injector(Protocol):
    """Says which results are wrong."""

    def is_wrong(self, moment: Moment) -> bool:
        """Whether what is validated at `moment` is."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One fault, in the `call`-th validation of `step` on `rank`, counted from 0. A persistent one
    is wherever `hardware` is, whichever rank that may be; None: on what `rank` has.

    Raises:
        ValueError: an unknown kind.
    """

    kind: str
    step: int
    rank: int = 0
    call: int = 0
    hardware: str | None = None

    def __post_init__(self) -> None:
        checked_kind(self.kind)

    def is_wrong(self, moment: Moment) -> bool:
        """Whether what is validated at `moment` is."""
        if (moment.step, moment.call) != (self.step, self.call):
            return False
        kind = VerdictKind(self.kind)
        if kind is VerdictKind.PERSISTENT and self.hardware is not None:
            return moment.hardware == self.hardware
        is_hit = moment.rank == self.rank
        return is_hit and (moment.is_first or kind is not VerdictKind.TRANSIENT)


class RerunErrorInjector:
    """Random faults of one `kind`: on average one in `rate` validations is wrong, none with 0.

    Raises:
        ValueError, TypeError: an unknown kind; a rate that is no whole number, or below 0.
    """

    def __init__(self, rate: int, kind: str, *, seed: int = 0) -> None:
        require_count("rate", rate, 0)
        self._rate, self._kind, self._seed = rate, checked_kind(kind), seed

    def is_wrong(self, moment: Moment) -> bool:
        """Whether what is validated at `moment` is."""
        if not self._rate or (self._kind is VerdictKind.TRANSIENT and not moment.is_first):
            return False
        place = moment.hardware if self._kind is VerdictKind.PERSISTENT else moment.rank
        drawn = random.Random(f"{self._seed} {moment.step} {moment.call} {place}")
        return drawn.randrange(self._rate) == 0


def fault_here(
    kind: str, step: int, rank: int, environ: Mapping[str, str] = os.environ
) -> InjectedFault:
    """The fault that a run has in `step` on the local `rank` that it first started with: after our
    launcher has let the ranks change places, a persistent one stays where it was.

    Raises:
        ValueError: an unknown kind.
    """
    rotation = rotation_from(environ)
    if rotation is not None and checked_kind(kind) is VerdictKind.PERSISTENT:
        rank = rotation.rank_on(rank)
    return InjectedFault(kind, step, rank)


def checked_kind(kind: str) -> VerdictKind:
    """The kind of that name; raises `ValueError` with the list."""
    require_one_of("kind of a fault", kind, [one.value for one in VerdictKind])
    return VerdictKind(kind)


def wrong(result: Result) -> Result:
    """What a fault makes of a result: NaN, or where there is none other numbers."""
    if not isinstance(result, Tensor):
        return math.nan
    return torch.full_like(result, math.nan) if result.is_floating_point() else ~result
