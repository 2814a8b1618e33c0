"""What a rank says by its log, which is not pytest's."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings inside, as they come."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sidestream")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
