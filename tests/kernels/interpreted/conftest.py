"""These tests need Triton's interpreter in the whole process; `test_interpreted.py` starts one."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
collect_ignore = (
    []
    if os.environ.get("SIDESTREAM_KERNEL_SUITE") == "1"
    else [
        f"test_{name}.py"
        for name in ("cast", "device_codes", "flat_optim", "fp8_scaling", "mx", "norm", "nvfp4")
    ]
)


def pytest_collection_modifyitems(items):
    """Let the interpreter, which is numpy, overflow to infinity as the hardware does: silently."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"))
