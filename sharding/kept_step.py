"""What a step's forward and backward change beside parameters' values, kept in memory so that the
step can be run once more with the same bits.

    buffers            of all modules, whether they are saved or not
    gradients          those that there are when the step begins, mostly none
    wires              what messages of gradients still owe, and what noise counts with

Parameters are not kept: forward and backward leave them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .checkpoint.wires import Wires, wires_of
from .own_gradients import OwnGradients
from .tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Those of one module: the tensors themselves, and copies of their values."""

    owner: nn.Module
    tensors: Mapping[str, Tensor | None]
    values: Mapping[str, Tensor]

    def restore(self) -> None:
        self.owner._buffers.clear()
        self.owner._buffers.update(self.tensors)
        for name, values in self.values.items():
            tensor = self.tensors[name]
            assert tensor is not None, "what has values is a tensor"
            tensor.copy_(values)


@dataclass(frozen=True, slots=True)
class KeptStep:
    """Made by `keep_step`."""

    _module: nn.Module
    _buffers: tuple[_Buffers, ...]
    _gradients: tuple[tuple[nn.Parameter, Tensor, Tensor], ...]
    _owed: Mapping[str, Tensor]
    _backwards: tuple[int, ...]
    _largest: tuple[tuple[OwnGradients, Tensor], ...]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the module back to where it was: gradients that have come since are gone, whether
        they were exchanged or not. May be called more than once; no collective.
        """
        wires = _settled(self._module)
        for buffers in self._buffers:
            buffers.restore()
        for param in self._module.parameters():
            param.grad = None
        for param, grad, values in self._gradients:
            # A sharded one copies what it is given; others may be views that somebody holds.
            param.grad = values if isinstance(param, ShardedTensor) else grad.copy_(values)
        for name, owed in wires.owed.items():
            if name in self._owed:
                owed.tensor.copy_(self._owed[name])
            else:  # of a parameter that has become trainable since
                owed.tensor.zero_()
        for runtime, number in zip(wires.runtimes, self._backwards, strict=True):
            runtime.exchange_order.backwards = number
        for own, largest in self._largest:
            own.put_back(largest)


@torch.no_grad()
def keep_step(module: nn.Module) -> KeptStep:
    """Keep what forward and backward of a step are about to change in `module`, plain or sharded,
    so that `restore()` lets the step be run again with the same bits. Between two steps; no
    collective, and no host waits.

    Copies buffers, what error feedback owes (as many elements as the model has, if there is any),
    and gradients, if there are any: clear them before.

    Raises:
        RuntimeError: gradients of a sharded module wait for their exchange, under `no_sync`.
    """
    wires = _settled(module)
    for runtime in wires.runtimes:
        runtime.check_reduced("keep_step")
    own = [
        unit.reduction.own_gradients
        for runtime in wires.runtimes
        for unit in runtime.units
        if unit.reduction.own_gradients is not None
    ]
    return KeptStep(
        module,
        tuple(_buffers_of(part) for part in module.modules()),
        tuple(
            (param, grad, grad.clone())
            for param in module.parameters()
            if (grad := param.grad) is not None
        ),
        {name: owed.tensor.clone() for name, owed in wires.owed.items()},
        tuple(runtime.exchange_order.backwards for runtime in wires.runtimes),
        tuple((one, one.largest()) for one in own),
    )


def _settled(module: nn.Module) -> Wires:
    """The wires of `module`, whose parameters are at rest now."""
    wires = wires_of(module)
    for runtime in wires.runtimes:
        runtime.settle()
    return wires


def _buffers_of(owner: nn.Module) -> _Buffers:
    tensors = dict(owner._buffers)
    values = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    return _Buffers(owner, tensors, values)
