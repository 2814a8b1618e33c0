"""What stands in for Megatron-Core keeps nothing in its modules but what never changes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARDING = Path(__file__).resolve().parents[2] / "sharding"
SURFACE = (
    "config",
    "data_parallel",
    "data_parallel_base",
    "data_parallel_config",
    "exchange_sums",
    "expert_ranks",
    "finalize_model_grads",
    "fsdp2_units",
    "fused_gradients",
    "gradient_checks",
    "model_parallel_layout",
    "nccl_allocator",
    "nccl_options",
    "param_waits",
    "process_groups",
    "rank_grid",
    "reduce_scatter",
    "replicated_grads",
    "torch_fully_sharded",
)
FILES = [SHARDING / f"{name}.py" for name in SURFACE] + sorted((SHARDING / "fp8").glob("*.py"))
CHANGING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "update", "put", "__setitem__", "register"),
}


def changes(source: str) -> Iterator[str]:
    """Where something changes what a module has: `global`, a call, an item, an attribute."""
    tree = ast.parse(source)
    kept = {
        target.id
        for statement in tree.body
        for target in _targets(statement)
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        for target in _targets(node):
            if isinstance(target, (ast.Subscript, ast.Attribute)) and _root(target) in kept:
                yield f"line {node.lineno}: writes to {_root(target)}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGING
            and _root(node.func) in kept
        ):
            yield f"line {node.lineno}: {_root(node.func)}.{node.func.attr}(...)"


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SHARDING)))
def test_a_module_of_the_surface_keeps_no_state(path):
    assert not list(changes(path.read_text()))


def test_the_getters_keep_the_one_that_is_documented():
    assert list(changes((SHARDING / "parallel_state.py").read_text()))


@pytest.mark.parametrize(
    "statement",
    ["global KEPT", "KEPT['a'] = 1", "KEPT.append(1)", "KEPT.group = 1", "del KEPT[0]"],
)
def test_state_is_found(statement):
    assert list(changes(f"KEPT = {{}}\n\n\ndef keep():\n    {statement}\n"))
