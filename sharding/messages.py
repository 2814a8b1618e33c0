"""Lists in messages: the first few names, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 6


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """`names`, or the first of them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + more
