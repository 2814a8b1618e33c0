"""Processes that tests of the command start, and what they print."""

import json
import os

from sidestream.training.result import RESULT_PREFIX


def one_thread_each():
    """The environment in which every rank computes on one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parse_result(output):
    """The figures in the last line of a run's output."""
    last_line = output.splitlines()[-1]
    assert last_line.startswith(RESULT_PREFIX), output[-200:]
    return json.loads(last_line.removeprefix(RESULT_PREFIX))
