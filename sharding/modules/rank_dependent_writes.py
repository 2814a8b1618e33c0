"""Refuses modules whose forward writes parameters by what its rank's own inputs are."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import nn

_LOOKUPS = frozenset({"embedding", "embedding_bag"})


def refuse_rank_dependent_writes(module: nn.Module, world_size: int) -> None:
    """Refuse modules that write their weights as a rank's own inputs say, where there are others.

    Found are embeddings with `max_norm`, and a forward that itself calls `functional.embedding`
    with a keyword `max_norm`. Not found is one that calls it in another function, or with
    `max_norm` by position; nor any other write, which must be the same on all ranks.

    Raises:
        ValueError: there is one; it is named.
    """
    if world_size == 1:
        return
    for name, submodule in module.named_modules():
        max_norm = getattr(submodule, "max_norm", None)
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and max_norm:
            raise _refusal(f"parameter '{name}.weight'", f"max_norm={max_norm}")
        if _passes_max_norm(submodule):
            raise _refusal(f"module '{name or '(root)'}'", "an embedding(..., max_norm=)")


def _refusal(what: str, got: str) -> ValueError:
    return ValueError(
        f"{what}: expected writes in forward to be the same on all ranks, got {got}, which "
        "rescales the rows that a rank looks up, so that ranks would differ; set max_norm to None, "
        "or leave it out, and rescale the rows after optimizer.step"
    )


def _passes_max_norm(module: nn.Module) -> bool:
    """Whether the forward of `module` looks rows up with a `max_norm` of its own, or with one that
    it reads from the module and that is set there.
    """
    code = getattr(module.forward, "__code__", None)
    for part in _parts(code) if code is not None else ():
        if not _LOOKUPS.isdisjoint(part.co_names) and "max_norm" in _keywords(part):
            passed_on = "max_norm" in part.co_names or "max_norm" in part.co_varnames
            return bool(getattr(module, "max_norm", None)) or not passed_on
    return False


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


def _keywords(code: types.CodeType) -> set[object]:
    """The names of keyword arguments in calls, which are constants of the code."""
    return {name for names in code.co_consts if isinstance(names, tuple) for name in names}
