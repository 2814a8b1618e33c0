"""What a training loop asks of a data-parallel model, whichever way its gradients travel.

The names are those of Megatron-Core's base class, so that a loop written for it runs with ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.checks import check_number
from .arguments import require_module
from .modules.partition import is_dtensor
from .process_groups import ProcessGroupCollection, require_groups
from .tensor.sharded_tensor import ShardedTensor


def own_part(tensor: Any) -> Tensor:
    """This rank's elements of a gradient or parameter: a view.

    Raises:
        RuntimeError: it waits for its exchange.
    """
    if isinstance(tensor, ShardedTensor):
        tensor.require_exchanged()
        return tensor.local
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.detach()


def one_factor(factor: float | Tensor) -> float | Tensor:
    """A number, or a tensor of one element as one of no dimension.

    Raises:
        TypeError: neither.
        ValueError: a tensor of more or fewer elements.
    """
    if not isinstance(factor, Tensor):
        return check_number("factor", factor)
    if factor.numel() != 1:
        raise ValueError(
            f"factor: expected a number or a tensor of one element, got shape "
            f"{tuple(factor.shape)}; scale parts of gradients one by one"
        )
    return factor.detach().view(())


class DataParallelBase(nn.Module):
    """A wrapper around `module`, which it calls. Without more, one rank's model: there is nothing
    to exchange. Derived classes replace what has something to do.

    process_groups: the collection around this rank, for `finalize_model_grads`; None: all ranks
    are data-parallel. averages_gradients: whether the exchange divides sums by the ranks.
    """

    averages_gradients = False

    def __init__(
        self, module: nn.Module, process_groups: ProcessGroupCollection | None = None
    ) -> None:
        """module: the whole model. It and the groups stay reachable under these names.

        Raises:
            TypeError: an argument of another type.
        """
        super().__init__()
        require_module(module)
        require_groups(process_groups)
        self.module = module
        self.process_groups = process_groups
        self.register_load_state_dict_pre_hook(_name_as_held)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside add to this rank's own gradients alone."""
        return contextlib.nullcontext()

    def start_grad_sync(self) -> None:
        """The same as `finish_grad_sync`: what can overlap backward has begun there."""
        self.finish_grad_sync()

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are exchanged."""

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor`, a number or a tensor of one element.

        Raises:
            TypeError, ValueError: another factor.
            RuntimeError: some gradients were not exchanged yet.
        """
        factor = one_factor(factor)
        grads = [own_part(grad) for one in self._holders() if (grad := one.grad) is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def zero_grad_buffer(self) -> None:
        """Clear all gradients, those that were not exchanged too."""
        for holder in self._holders():
            holder.grad = None

    def _holders(self) -> Iterable[Tensor]:
        """What has the gradients."""
        return self.parameters()

    def broadcast_params(self) -> None:
        """Give all ranks the values of the first."""

    # ---- state, under the names of the module: they have no prefix `module.`

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This one, then the module and those in it. Parameters and buffers have their names by
        these, for a module around it too.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(
        self, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """What a checkpoint is to hold: the module's own choice if it has such a method, else its
        state.
        """
        own = getattr(self.module, "state_dict_for_save_checkpoint", self.module.state_dict)
        found: dict[str, Any] = own(prefix=prefix, keep_vars=keep_vars)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """That of the module; what it raises, too."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """By which torch's `get_state_dict` and its like find what has these names."""
        inside = self.module
        names = (*inside._modules, *inside._parameters, *inside._buffers)
        return dict.fromkeys(names, "module")


def _name_as_held(_wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """A module around it loads, each child by the name under which it is held."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)
