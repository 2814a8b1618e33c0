"""How torch.distributed.checkpoint is called: quietly, with errors that say on which ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import checkpoint as dcp

from ..errors import communicating, in_words
from .ranks import Ranks


@contextmanager
def running_dcp(what: str, ranks: Ranks) -> Iterator[None]:
    """Keep DCP's note on single processes quiet, and turn its errors into ordinary ones.

    Raises:
        OSError: a file could not be read or written on some of `ranks`.
        RuntimeError: anything else, in place of CheckpointException, which `except Exception` would
            miss; on a rank that was interrupted, KeyboardInterrupt or the like.
        CommunicationError: a rank died meanwhile.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        try:
            with communicating(what):
                yield
        except dcp.CheckpointException as error:
            failures = {place: kept[0] for place, kept in error.failures.items()}
            raise _ordinary(what, failures, ranks) from error


def _ordinary(what: str, failures: Mapping[int, BaseException], ranks: Ranks) -> BaseException:
    """The error for this rank, from what ended `what` on some ranks."""
    own = failures.get(ranks.place)
    if own is not None and not isinstance(own, Exception):
        return own
    texts = [
        f"rank {ranks.numbers[place]}: {in_words(failure)}" for place, failure in failures.items()
    ]
    is_file_error = any(isinstance(failure, OSError) for failure in failures.values())
    return (OSError if is_file_error else RuntimeError)(f"{what} failed on {'; '.join(texts)}")
