"""Numbers that compiled kernels read from memory, and the CUDA graphs that follow them."""

import pytest

from sidestream.tests.kernels import numbers
from sidestream.tests.kernels.optim.test_on_gpu import captured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("call", numbers.CALLS, ids=numbers.IDS)
def test_a_replay_reads_its_number_anew(call):
    """Wherever it lies: its address is no multiple of 16. Nor does a host: that ends a capture."""
    x, on_cpu = numbers.source("cuda"), numbers.source()
    number = call.number(device="cuda").repeat(4)[1:2]
    made = []

    def step():
        made[:] = call.run(x, number)
        number.add_(1)

    graph = captured(step)
    number.fill_(numbers.VALUES[call.kind])
    seen = set()
    for _ in range(3):
        expected = call.run(on_cpu, number.item())
        graph.replay()
        assert numbers.same(made, expected)
        seen.add(bytes(numbers.bits(made)[0].tolist()))
    assert len(seen) == 3
