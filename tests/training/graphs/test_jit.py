"""Fused functions obey the switch whenever it is turned, and keep what they were."""

import inspect
import threading

import pytest
import torch

from sidestream.training.graphs import (
    disable_jit_fuser,
    enable_jit_fuser,
    jit_fuser,
    jit_fuser_disabled,
    noop_decorator,
)


class Counting:
    """A backend of `torch.compile` that runs graphs as they are, and counts those made and run."""

    def __init__(self):
        self.made = self.run = 0

    def __call__(self, graph, _inputs):
        self.made += 1

        def run(*args):
            self.run += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def backend():
    yield Counting()
    enable_jit_fuser()


def test_the_switch_works_after_decoration(backend):
    @jit_fuser(backend=backend)
    def twice(x, *, scale=2.0):
        """Of x."""
        return x * scale

    x = torch.arange(3.0)
    assert (twice.__name__, twice.__doc__) == ("twice", "Of x.")
    assert str(inspect.signature(twice)) == "(x, *, scale=2.0)"
    disable_jit_fuser()
    assert torch.equal(twice(x), x * 2)
    assert backend.made == 0
    enable_jit_fuser()
    assert torch.equal(twice(x, scale=3.0), x * 3)
    assert (backend.made, backend.run) == (1, 1)
    with jit_fuser_disabled(), jit_fuser_disabled():
        twice(x, scale=3.0)
    disable_jit_fuser()
    twice(x, scale=3.0)
    assert backend.run == 1
    enable_jit_fuser()
    twice(x, scale=3.0)  # of what was compiled before
    assert (backend.made, backend.run) == (1, 2)


def test_methods_and_nested_functions_are_one_graph(backend):
    class Layer:
        factor = 3.0

        @jit_fuser(backend=backend)
        def inner(self, x):
            return x * self.factor

        @classmethod
        @jit_fuser(backend=backend)
        def of_class(cls, x):
            return x - cls.factor

    layer = Layer()

    @jit_fuser(backend=backend)
    def outer(x):
        return layer.inner(x) + 1

    x = torch.arange(3.0)
    assert torch.equal(outer(x), x * 3 + 1)
    assert (backend.made, backend.run) == (1, 1)
    assert torch.equal(layer.inner(x), x * 3)
    assert torch.equal(Layer.of_class(x), x - 3)
    assert (backend.made, backend.run) == (3, 3)


def test_a_block_is_of_its_thread_alone(backend):
    @jit_fuser(backend=backend)
    def negative(x):
        return -x

    def from_threads():
        threads = [threading.Thread(target=negative, args=(torch.ones(2),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    negative(torch.ones(2))  # torch may compile what threads call first once in each
    with jit_fuser_disabled():
        negative(torch.ones(2))
        assert backend.run == 1
        from_threads()
    assert (backend.made, backend.run) == (1, 4)
    disable_jit_fuser()
    from_threads()
    assert backend.run == 4


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="got property"):
        jit_fuser(property(lambda _: 1))


def test_noop_decorator():
    assert noop_decorator(len) is len
