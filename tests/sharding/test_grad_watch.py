"""Tests of the moment when a unit's gradients are complete: any order of arrival, any subset."""

import itertools
import weakref

import pytest
import torch
from torch import nn

from sidestream.sharding.grad_watch import GradientWatch


class Watched:
    """Three parameters under a watch, and which of them had gradients whenever it called."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.calls: list[list[bool]] = []
        self.watch = GradientWatch(self.params)
        self.watch.on_complete = self.complete

    def complete(self) -> None:
        self.calls.append([param.grad is not None for param in self.params])

    def backward(self, order: tuple[int, ...]) -> None:
        """A backward in which the parameters' gradients come in `order`."""
        value = torch.ones(2, requires_grad=True) * 1.0
        # The last one used gets its gradient first.
        for index in reversed(order):
            value = value * self.params[index]
        value.sum().backward()

    def take(self) -> None:
        """What a reduction does once a backward is over."""
        for param in self.params:
            param.grad = None
        self.watch.rearm()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_calls_once_when_the_last_gradient_is_there(order: tuple[int, ...]) -> None:
    watched = Watched()
    arrivals: list[int] = []
    for index, param in enumerate(watched.params):
        param.register_post_accumulate_grad_hook(lambda _, index=index: arrivals.append(index))
    for _ in range(3):
        watched.backward(order)
        watched.take()
    assert arrivals == list(order) * 3, "the test does not bring gradients in the order it means to"
    assert watched.calls == [[True] * 3] * 3


def test_orders_may_change_between_backwards() -> None:
    watched = Watched()
    for count, order in enumerate(itertools.permutations(range(3)), start=1):
        watched.backward(order)
        assert watched.calls == [[True] * 3] * count
        watched.take()


@pytest.mark.parametrize("missing", range(3))
def test_a_gradient_that_never_comes_means_no_call_and_spoils_nothing(missing: int) -> None:
    watched = Watched()
    present = tuple(index for index in range(3) if index != missing)
    for _ in range(2):
        watched.backward(present)
        assert watched.calls == []
        watched.take()
    watched.backward((2, 1, 0))
    assert watched.calls == [[True] * 3]


def test_follows_frozen_and_unfrozen_parameters() -> None:
    watched = Watched()
    watched.params[0].requires_grad_(False)
    watched.watch.follow_requires_grad()
    watched.backward((2, 1, 0))
    assert watched.calls == [[False, True, True]]
    watched.take()
    watched.params[0].requires_grad_(True)
    watched.watch.follow_requires_grad()
    watched.backward((2, 1, 0))
    assert watched.calls == [[False, True, True], [True] * 3]


def test_the_usual_order_takes_one_hook() -> None:
    watched = Watched()
    watched.backward((2, 1, 0))
    hooks = [param._post_accumulate_grad_hooks for param in watched.params]
    assert [bool(hook) for hook in hooks] == [True, False, False]


def test_a_second_accumulation_in_one_backward_calls_once() -> None:
    watched = Watched()
    watched.backward((2, 1, 0))
    watched.backward((2, 1, 0))  # as a reentrant checkpoint does, before anybody took the gradients
    assert len(watched.calls) == 1


def test_hooks_keep_nothing_alive() -> None:
    watched = Watched()
    watch = weakref.ref(watched.watch)
    del watched.watch
    assert watch() is None, "a parameter's hook holds the watch"
