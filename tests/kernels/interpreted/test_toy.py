"""A format registered from outside, through the interpreted kernels."""

import pytest

from sidestream.kernels.op import launching_on_cpu
from sidestream.tests.kernels.wire import toy


@pytest.mark.parametrize("check", toy.CHECKS)
def test_in_the_interpreter(check):
    with toy.formats(), launching_on_cpu():
        toy.CHECKS[check]()
