"""The moment in backward when every trainable parameter of a unit has its gradient.

Parameters mostly get their gradients in reverse order of registration, so waiting for the first one
that still lacks its gradient usually means waiting for the last to come. Only such parameters carry
a hook: nine hooks on nine parameters cost the host as much time as packing their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .modules.uncompiled import uncompiled


def call_weakly(method: weakref.WeakMethod[Any], *arguments: int) -> None:
    """Call a method of what must still live."""
    target = method()
    assert target is not None, "a backward outlived its model"
    target(*arguments)


class GradientWatch:
    """Calls `on_complete` when all of `params` that require a gradient have one.

    Whoever takes the gradients away must `rearm` the watch for the next backward.
    """

    on_complete: Callable[[], None]

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._hooked: set[int] = set()
        self._told: set[int] = set()
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Some parameters may have been frozen or unfrozen."""
        self.trainable = [param for param in self._params if param.requires_grad]
        self.rearm()

    def rearm(self) -> None:
        """Start over, once nobody holds a gradient any more."""
        self._awaited = 0
        self._told.clear()
        if self.trainable:
            self._hook(self.trainable[0])

    def tell(self, param: Tensor) -> None:
        """The gradient of `param` is there, though not as its `grad`."""
        self._told.add(id(param))
        self._advance()

    def _hook(self, param: nn.Parameter) -> None:
        if id(param) in self._hooked:
            return
        self._hooked.add(id(param))
        # Weak: a parameter's hook must not keep its own unit, and so itself, alive.
        reference = weakref.ref(self)

        @uncompiled
        def gradient_came(_param: Tensor) -> None:
            watch = reference()
            assert watch is not None
            watch._advance()

        param.register_post_accumulate_grad_hook(gradient_came)

    def _advance(self) -> None:
        trainable, place = self.trainable, self._awaited
        while place < len(trainable):
            if trainable[place].grad is None and id(trainable[place]) not in self._told:
                self._awaited = place
                # Its gradient has not come, so a hook set now still sees it come.
                self._hook(trainable[place])
                return
            place += 1
        if self._awaited < place:
            self._awaited = place
            self.on_complete()
