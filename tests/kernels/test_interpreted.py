"""The kernels in Triton's interpreter, bit for bit: `interpreted/`, in a process of its own."""

import re

import pytest

from sidestream.tests.kernels import interpreter


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_in_the_interpreter(interpreted):
    status, output = interpreted()
    assert status == 0, output[-6000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed, output[-2000:]
    # Each test function makes one test or more: a run with fewer did not test the kernels.
    assert int(passed[1]) >= interpreter.num_tests() > 0
    assert "skipped" not in output
