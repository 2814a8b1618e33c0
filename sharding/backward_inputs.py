"""Sharded parameters as `inputs` of `backward` and `torch.autograd.grad`: the engine gets what
stands for them in the graph.

The engine knows leaves by identity, and a sharded parameter is none: it would be passed over
without a word. PyTorch offers no hook there before 2.13, so the one function through which both
calls reach the engine, whoever imported them and when, is replaced by one that looks at the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .sharded_tensor import ShardedTensor


def follow_sharded_inputs() -> None:
    """Make `backward(inputs=...)` and `grad` take sharded parameters, once in a process."""
    namespace: Any = torch.autograd
    if not hasattr(namespace._engine_run_backward, "takes_sharded"):
        namespace._engine_run_backward = _translating(namespace._engine_run_backward)


def _translating(engine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(engine)
    def run_backward(
        outputs: Sequence[Any],
        grads: Any,
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        for output in outputs:
            if type(output) is ShardedTensor:
                raise _lost(output, "the backward of")
        if any(type(x) is ShardedTensor for x in inputs):
            inputs = tuple(_in_graph(x) if type(x) is ShardedTensor else x for x in inputs)
        return engine(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)

    run_backward.takes_sharded = True  # type: ignore[attr-defined]
    return run_backward


def _in_graph(parameter: ShardedTensor) -> nn.Parameter:
    if parameter.grad_source is None:
        raise _lost(parameter, "inputs with")
    try:
        leaf, _ = parameter.grad_source.graph_leaf(parameter)
    except ReferenceError:
        raise RuntimeError(
            f"inputs: {parameter.describe()} belongs to a model that is gone"
        ) from None
    return leaf


def _lost(tensor: Tensor, what: str) -> RuntimeError:
    assert isinstance(tensor, ShardedTensor)
    return RuntimeError(
        f"{what} {tensor.describe()}: expected a plain tensor or a parameter of a sharded model, "
        "got the result of an operator on one rank's part, through which no gradient reaches a "
        "parameter; compute with p.full_tensor() or p.to_local() instead"
    )
