"""Numbers that interpreted kernels read from memory: the bits of those that they are given."""

import pytest

from sidestream.kernels.launch import recorded
from sidestream.kernels.op import launching_on_cpu
from sidestream.tests.kernels import numbers


@pytest.mark.parametrize("call", numbers.CALLS, ids=numbers.IDS)
def test_a_kernel_reads_its_number(call):
    """Anew at each call, wherever it lies: its address is no multiple of 16 here."""
    x = numbers.source()
    number = call.number().repeat(4)[1:2]
    for value in (numbers.VALUES[call.kind], 2):
        number.fill_(value)
        with launching_on_cpu():
            found = call.run(x, number)
        assert numbers.same(found, call.run(x, value))
    with launching_on_cpu(), recorded() as record:
        call.run(x, number)
    assert any(launch.arguments.get(call.kind) is number for launch in record)
