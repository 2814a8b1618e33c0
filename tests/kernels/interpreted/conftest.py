"""These tests need Triton's interpreter in the whole process; `test_interpreted.py` starts one."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_collection_modifyitems(items):
    """Let the interpreter, which is numpy, overflow to infinity as the hardware does: silently."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"))
