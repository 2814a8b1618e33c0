"""Processes that tests of the command start."""

import os


def one_thread_each():
    """The environment in which every rank computes on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
