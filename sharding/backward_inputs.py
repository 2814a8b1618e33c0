"""Sharded parameters as `inputs` of `backward` and `torch.autograd.grad`: the engine gets what
stands for them in the graph.

The engine knows leaves by identity, and a sharded parameter is none: it would be passed over
without a word. PyTorch offers no hook there before 2.13, so the one function through which both
calls reach the engine, whoever imported them and when, is replaced by one that looks at the inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .tensor.sharded_tensor import ShardedTensor


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
        *unused: bool,  # `grad` says whether they are allowed, `backward` never refuses them
        **options: Any,
    ) -> Any:
        run = functools.partial(engine, outputs, grads, retain_graph, create_graph)
        of_sharded = [output for output in outputs if type(output) is ShardedTensor]
        if of_sharded and not unused:
            raise _lost(of_sharded[0], "the backward of")
        # In a graph of operators on one rank's part, the parameters stand for themselves.
        if of_sharded or not any(type(x) is ShardedTensor for x in inputs):
            return run(inputs, *unused, **options)
        leaves = [_in_graph(x) if type(x) is ShardedTensor else [x] for x in inputs]
        flat = tuple(itertools.chain.from_iterable(leaves))
        result = run(flat, *(len(flat) > len(inputs) or allowed for allowed in unused), **options)
        return _sums(result, leaves, all(unused)) if result else result

    run_backward.takes_sharded = True  # type: ignore[attr-defined]
    return run_backward


def _in_graph(parameter: ShardedTensor) -> list[nn.Parameter]:
    if parameter.grad_source is None:
        raise _lost(parameter, "inputs with")
    try:
        return parameter.grad_source.graph_leaves(parameter)
    except ReferenceError:
        raise RuntimeError(
            f"inputs: expected parameters of a model that exists, got {parameter.describe()}, "
            "whose model is gone; keep the model"
        ) from None


def _sums(
    result: Sequence[Tensor | None], leaves: Sequence[Sequence[Any]], allow_unused: bool
) -> tuple[Tensor | None, ...]:
    """Every input's gradient, from those of all that stands for it."""
    grads = iter(result)
    sums: list[Tensor | None] = []
    for stand_ins in leaves:
        found = [grad for grad in itertools.islice(grads, len(stand_ins)) if grad is not None]
        if not found and not allow_unused:
            raise RuntimeError(
                "inputs: expected tensors that the graph reaches, got one that appears to not have "
                "been used in the graph; pass allow_unused=True if that is wanted"
            )
        sums.append(sum(found[1:], start=found[0]) if found else None)
    return tuple(sums)


def _lost(tensor: Tensor, what: str) -> RuntimeError:
    assert isinstance(tensor, ShardedTensor)
    return RuntimeError(
        f"{what} {tensor.describe()}: expected a plain tensor or a parameter of a sharded model, "
        "got the result of an operator on one rank's part, through which no gradient reaches a "
        "parameter; compute with p.full_tensor() or p.to_local() instead"
    )
