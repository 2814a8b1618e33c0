"""What a run says beside its figures."""

import sys


def say(text: str) -> None:
    """Print `text` to standard error, as sidestream's."""
    print(f"sidestream: {text}", file=sys.stderr, flush=True)
