"""What all ranks do alike when they save or load: they fail together, and mean the same thing."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch.distributed as dist

from ..errors import communicating, in_words

# A subclass stands before its base.
_SHAREABLE: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    OSError,
    TypeError,
    ValueError,
)

_Report = tuple[tuple[type[Exception], str] | None, dict[str, tuple[str, str]]]


class Alike:
    """A block that all ranks leave alike: an error on some of them is raised on every one, and so
    is a difference in what they told with `tell`.
    """

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, str]] = {}

    def tell(self, name: str, value: str, described: str = "") -> None:
        """Have `value` of argument `name` compared with the other ranks'; an error shows
        `described` in its place.
        """
        self._told[name] = (value, described or value)

    def __enter__(self) -> Alike:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not dist.is_initialized():
            return
        reports: list[_Report] = [(None, {})] * dist.get_world_size()
        failure = None if error is None else _report(error)
        # Where one rank is interrupted, others may be too, and so be gone: its error stays.
        hides = () if error is None or isinstance(error, Exception) else (RuntimeError,)
        with contextlib.suppress(*hides), communicating("agreement on the checkpoint"):
            dist.all_gather_object(reports, (failure, self._told))
        if error is not None:
            return
        for rank, (failure, _) in enumerate(reports):
            if failure is not None:
                raise failure[0](f"rank {rank}: {failure[1]}")
        for rank, (_, told) in enumerate(reports):
            for name, (value, described) in told.items():
                if value != reports[0][1][name][0]:
                    raise ValueError(
                        f"{name}: expected the same on every rank, got {reports[0][1][name][1]} on "
                        f"rank 0 and {described} on rank {rank}; pass the same everywhere"
                    )


def _report(error: BaseException) -> tuple[type[Exception], str]:
    """What other ranks raise where one has `error`."""
    known = next((known for known in _SHAREABLE if isinstance(error, known)), RuntimeError)
    return known, str(error) if isinstance(error, Exception) else in_words(error)
