"""Errors of our own: of collectives that failed, and of gradients that are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from .in_flight import REPORTS, noting


class CommunicationError(RuntimeError):
    """A collective failed; the message names it, the unit it served and the ranks it waited for."""


class DivergentUseError(RuntimeError):
    """Ranks used different units of a sharded model; the message names units and ranks."""


class NonFiniteGradientError(RuntimeError):
    """A step was asked for with gradients that are NaN or infinite, and
    `MixedPrecisionPolicy(nonfinite_grads="raise")` refuses it, on every rank, before it begins.

    `ranks`: the parameters whose sum is not finite, and for each the ranks whose own gradient was
    not; none where the sum overflowed. `step`: how many steps the optimizer had made.
    """

    def __init__(self, message: str, ranks: Mapping[str, tuple[int, ...]], step: int) -> None:
        super().__init__(message)
        self.ranks = dict(ranks)
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks, self.step)


_RAISED_BY_BACKENDS = (
    RuntimeError,
    dist.DistBackendError,
    dist.DistNetworkError,
    dist.DistStoreError,
)


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Name `what` if a backend's error ends the block.

    Raises:
        CommunicationError: a collective inside failed, for example because a peer died.
    """
    with noting(what):
        try:
            yield
        except RuntimeError as error:
            # A backend and a store raise these classes themselves; subclasses have other causes.
            if type(error) not in _RAISED_BY_BACKENDS:
                raise
            raise communication_error(what, error) from error


def communication_error(what: str, error: Exception) -> CommunicationError:
    """What to raise in place of a backend's own `error` in `what`, in which this thread stands:
    with what the ranks are found to do, where they can be asked.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = REPORTS.of_failure()
    return CommunicationError(
        f"rank {rank}: {what} failed ({type(error).__name__}: {str(error).strip()}). A rank it "
        "waited for has probably died or fallen behind the timeout: look for the first error among "
        "the other ranks" + (f". What the ranks do: {found}" if found else "")
    )


def in_words(error: BaseException) -> str:
    """`error` in a few words, for the other ranks."""
    if not isinstance(error, Exception):
        return f"interrupted by {type(error).__name__}"
    return str(error) if isinstance(error, OSError) else repr(error)
