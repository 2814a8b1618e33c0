"""Module and autograd hooks -> runtime events, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .runtime import Runtime
from .structures import map_tensors, tensors_in
from .uncompiled import uncompiled
from .use_order import UnitGroup


def install_hooks(
    module: nn.Module, group: UnitGroup, runtime: Runtime, *, input_dtype: torch.dtype | None = None
) -> None:
    """Make `module`'s forward and backward drive `runtime`. Floating inputs are cast to
    `input_dtype`.
    """

    @uncompiled
    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if group.is_root:
            runtime.root_pre_forward()
        runtime.pre_forward(group)
        if input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), input_dtype)
        if group.has_frozen and torch.is_grad_enabled():
            _watch_inputs(group, (args, kwargs), inputs_done)
        return args, kwargs

    @uncompiled
    def inputs_done(_grads: object) -> None:
        runtime.inputs_done(group)

    @uncompiled
    def pre_backward(_grads: object) -> None:
        runtime.pre_backward(group)

    @uncompiled
    def perhaps_pre_backward(_grads: object) -> None:
        runtime.pre_backward(group, certain=False)

    @uncompiled
    def post_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            _watch_outputs(output, (args, kwargs), pre_backward, perhaps_pre_backward)
        runtime.post_forward(group, output)

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, with_kwargs=True)


def install_root_hooks(
    module: nn.Module, runtime: Runtime, *, output_dtype: torch.dtype | None
) -> None:
    """What only the root has: state dicts see parameters at rest, and the output is cast."""

    @uncompiled
    def to_rest(*_: object) -> None:
        runtime.settle()

    for submodule in module.modules():
        submodule.register_state_dict_pre_hook(to_rest)
    module.register_load_state_dict_pre_hook(to_rest)
    if output_dtype is not None:

        @uncompiled
        def cast_output(_module: nn.Module, _args: object, output: Any) -> Any:
            return cast_floating(output, output_dtype)

        module.register_forward_hook(cast_output)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`, the rest untouched."""
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


def _watch_outputs(
    output: object,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    begins: Callable[[object], None],
    may_begin: Callable[[object], None],
) -> None:
    """Call `begins` before the gradient flows into a node that made an output, and `may_begin` if
    that output is an input, as it came or changed in place.
    """
    args, kwargs = inputs
    if type(output) is Tensor and output._base is None:
        if output.grad_fn is not None:
            given = any(output is value for value in (*args, *kwargs.values()))
            output.grad_fn.register_prehook(may_begin if given else begins)
        return
    given_ids: set[int] = set()
    for tensor in tensors_in(inputs):
        given_ids |= {id(tensor), id(tensor._base)}
    watched: set[object] = set()
    for tensor in tensors_in(output):
        # On the node, not the tensor: an in-place change of the output keeps its node in the graph.
        # A change through a view makes a new node for the view, but keeps the base's.
        sources = [tensor] if tensor._base is None else [tensor, tensor._base]
        for source in sources:
            node = source.grad_fn
            if node is not None and node not in watched:
                watched.add(node)
                node.register_prehook(may_begin if id(source) in given_ids else begins)


def _watch_inputs(group: UnitGroup, inputs: object, done: Callable[[Any], None]) -> None:
    """Call `done` when the gradients of all inputs of this call are there."""
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if tensors:
        group.open_inputs += 1
        torch.autograd.graph.register_multi_grad_hook(tensors, done, mode="all")
