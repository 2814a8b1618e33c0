"""What a sharded parameter asks of whoever owns its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor


class HoldsSum(Protocol):
    """The gradients of a unit."""

    @property
    def has_unreduced_sum(self) -> bool:
        """Whether some were accumulated under `no_sync` and not exchanged since."""


class GradSource(Protocol):
    """Where a sharded parameter's gradient lives, once for all parameters of a unit."""

    def get_grad(self, parameter: ShardedTensor) -> ShardedTensor | None:
        """The gradient of `parameter` in its layout, or None."""

    def set_grad(self, parameter: ShardedTensor, value: ShardedTensor | None) -> None:
        """Replace the gradient of `parameter`; None drops it."""

    def requires_grad_changed(self) -> None:
        """A parameter was frozen or unfrozen."""

    def graph_leaf(self, parameter: ShardedTensor) -> tuple[nn.Parameter, Callable[[], None]]:
        """What stands for `parameter` in autograd's graphs, and what is to be called in backward
        when a gradient of it comes.
        """

    def graph_leaves(self, parameter: ShardedTensor) -> list[nn.Parameter]:
        """All that may stand for `parameter` in graphs, that of `graph_leaf` first."""
