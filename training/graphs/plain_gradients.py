"""A module that is not sharded in a CUDA graph of a whole step: its gradients lie in the graph's
memory, and each replay shows them again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(eq=False, slots=True)
class PlainPart:
    """What one graph leaves behind in a module: which parameters have which gradients."""

    gradients: list[tuple[nn.Parameter, Tensor]]
    places: list[tuple[nn.Parameter, bool, int]]
    """Of each parameter whether it was trainable, and its address."""

    def before_replay(self) -> None:
        """The graph is enqueued next.

        Raises:
            RuntimeError: parameters were frozen, unfrozen or moved since it was recorded.
        """
        for param, was_trainable, address in self.places:
            if param.requires_grad != was_trainable or param.data_ptr() != address:
                raise RuntimeError(
                    "a step's CUDA graph: expected the parameters as they were when it was "
                    f"recorded, got one of shape {tuple(param.shape)} frozen, unfrozen or moved "
                    "since; call reset() after such a change"
                )

    def after_replay(self) -> None:
        """The graph is enqueued: what follows it sees its gradients."""
        for param, grad in self.gradients:
            param.grad = grad

    def drop(self) -> None:
        """The graph is gone; whoever holds a gradient keeps that."""


class PlainRecorder:
    """Records steps of one module on one rank; as `sharding.capture.StepRecorder`."""

    def __init__(self, module: nn.Module) -> None:
        self._params = dict(module.named_parameters())

    def reasons(self) -> list[str]:
        """Nothing is known that keeps a step of it from being recorded."""
        return []

    def kept_gradients(self) -> list[str]:
        """The parameters that have gradients, to which a step would add."""
        return [name for name, param in self._params.items() if param.grad is not None]

    def least(self, value: int) -> int:
        """There is no other rank."""
        return value

    def begin(self) -> None:
        """A recording begins next, with gradients cleared."""
        self._versions = {name: param._version for name, param in self._params.items()}

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Where the current stream records."""
        return contextlib.nullcontext()

    def end(self) -> PlainPart:
        """The step has been recorded.

        Raises:
            RuntimeError: it changed parameters.
        """
        names = self._versions.items()
        changed = [name for name, version in names if self._params[name]._version != version]
        if changed:
            raise RuntimeError(
                "a step's CUDA graph: expected a step that leaves parameters as they are, got "
                f"'{changed[0]}' changed in it; call optimizer.step() after the step"
            )
        params = self._params.values()
        return PlainPart(
            [(param, param.grad) for param in params if param.grad is not None],
            [(param, param.requires_grad, param.data_ptr()) for param in params],
        )

    def compare(self) -> None:
        """There is no other rank."""

    def fail(self) -> None:
        """What was recorded since `begin` will not run."""
        for param in self._params.values():
            param.grad = None
