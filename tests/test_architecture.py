"""Tests of the shape of the source: who imports whom, how long things grow, what a file opens with.

    kernels <- buffers <- sharding <- training <- bench
                                   <- integrations

Each rule is a function from a source to its complaints. It is run over every file of the package,
and over bad snippets that it must complain about, so that no rule can pass by looking at nothing.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A layer, and what it may import besides itself.
LAYERS = {
    "kernels": (),
    "buffers": ("kernels",),
    "sharding": ("kernels", "buffers"),
    "integrations": ("sharding",),
    "training": ("kernels", "buffers", "sharding"),
    "bench": ("kernels", "buffers", "sharding", "training"),
}
# Packages with a trainer or a model of their own: only the file of `integrations` that is named for
# one imports it.
ADAPTED = {"accelerate", "lightning", "peft", "pytorch_lightning", "transformers"}
RANKLESS_LAYERS = ("kernels", "buffers")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_JIT_KERNEL_LINES = 100
MAX_POSITIONAL_PARAMETERS = 6
# What starts before the package has a name on the machine, so that it cannot import relatively.
SCRIPTS = (
    "bench/gpu_check.py",
    "bench/test_speed/test_kernels.py",
    "bench/test_speed/test_messages.py",
    "bench/test_speed/test_timers.py",
)


@dataclass(frozen=True)
class Source:
    """One file of the package, its path relative to the root."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def layer(self) -> str | None:
        """The layer the file stands in; None for top-level files, which may import any layer."""
        first = self.path.split("/")[0]
        return first if first in LAYERS else None


@dataclass(frozen=True)
class Import:
    """One imported name; a relative import's `module` starts at the root (`buffers.layout`)."""

    line: int
    module: str
    name: str | None
    relative: bool

    @property
    def layer(self) -> str | None:
        first = self.module.split(".")[0] if self.module else self.name
        return first if self.relative and first in LAYERS else None


def _imports(source: Source) -> Iterator[Import]:
    folders = source.path.split("/")[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None, relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = folders[: len(folders) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, module, alias.name, relative=node.level > 0)


def _functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _is_jit(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        "jit" in ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list
    )


def imports_point_down(source: Source) -> list[str]:
    if source.layer is None:
        return []
    allowed = {source.layer, *LAYERS[source.layer]}
    return [
        f"line {found.line}: {source.layer} imports {found.layer}, which does not stand below it"
        for found in _imports(source)
        if found.layer is not None and found.layer not in allowed
    ]


def imports_are_relative(source: Source) -> list[str]:
    own = {*LAYERS, "sidestream", "tests"}
    return [
        f"line {found.line}: {found.module} is our own, import it relatively"
        for found in _imports(source)
        if not found.relative and found.module.split(".")[0] in own and source.path not in SCRIPTS
    ]


def adapted_packages_are_imported_by_their_file(source: Source) -> list[str]:
    complaints = []
    for found in _imports(source):
        package = found.module.split(".")[0]
        own = source.path == f"integrations/{package}.py"
        if not found.relative and package in ADAPTED and not own:
            complaints.append(
                f"line {found.line}: {package} is imported by integrations/{package}.py alone"
            )
        if found.layer == "integrations" != source.layer:
            complaints.append(f"line {found.line}: nothing of ours imports integrations")
    return complaints


def private_names_stay_in_their_layer(source: Source) -> list[str]:
    return [
        f"line {found.line}: {found.module}.{found.name} is private to {found.layer}"
        for found in _imports(source)
        if found.layer not in (None, source.layer)
        and any(_is_private(part) for part in [*found.module.split("."), found.name or ""])
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def kernels_and_buffers_know_no_ranks(source: Source) -> list[str]:
    if source.layer not in RANKLESS_LAYERS:
        return []
    complaints = [
        f"line {found.line}: {source.layer} imports torch.distributed"
        for found in _imports(source)
        if f"{found.module}.{found.name}.".startswith("torch.distributed.")
    ]
    used = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    complaints += [
        f"line {node.lineno}: {source.layer} uses torch.distributed"
        for node in used
        if ast.unparse(node) == "torch.distributed"
    ]
    return complaints


def file_opens_with_a_docstring(source: Source) -> list[str]:
    return (
        [] if ast.get_docstring(source.tree) else ["line 1: say in one sentence what the file has"]
    )


def file_is_short(source: Source) -> list[str]:
    lines = source.text.count("\n")
    return [f"{lines} lines, at most {MAX_FILE_LINES}: split it"] if lines > MAX_FILE_LINES else []


def functions_are_short(source: Source) -> list[str]:
    complaints = []
    for function in _functions(source):
        lines = _lines(function) - (_lines(function.body[0]) if ast.get_docstring(function) else 0)
        limit = MAX_JIT_KERNEL_LINES if _is_jit(function) else MAX_FUNCTION_LINES
        if lines > limit:
            complaints.append(
                f"line {function.lineno}: {function.name} has {lines} lines, at most {limit}"
            )
    return complaints


def functions_take_few_positional_parameters(source: Source) -> list[str]:
    complaints = []
    for function in _functions(source):
        parameters = [*function.args.posonlyargs, *function.args.args]
        count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
        if (
            count > MAX_POSITIONAL_PARAMETERS
            and not _is_jit(function)
            and source.layer != "kernels"
        ):
            complaints.append(
                f"line {function.lineno}: {function.name} takes {count} positional parameters, at "
                f"most {MAX_POSITIONAL_PARAMETERS}: make options keyword-only, or pass a dataclass"
            )
    return complaints


Rule = Callable[[Source], list[str]]

RULES: tuple[Rule, ...] = (
    imports_point_down,
    imports_are_relative,
    adapted_packages_are_imported_by_their_file,
    private_names_stay_in_their_layer,
    kernels_and_buffers_know_no_ranks,
    file_opens_with_a_docstring,
    file_is_short,
    functions_are_short,
    functions_take_few_positional_parameters,
)

JIT_LINES = "\n".join(["@triton.jit", "def _kernel(a):", *["    a += 1"] * MAX_JIT_KERNEL_LINES])
LONG_FUNCTION = "\n".join(["def long(a):", '    """Long."""', *["    a += 1"] * MAX_FUNCTION_LINES])

BAD: tuple[tuple[Rule, str, str], ...] = (
    (imports_point_down, "buffers/x.py", "from ..sharding.unit import Unit"),
    (imports_point_down, "kernels/x.py", "from .. import buffers"),
    (imports_point_down, "sharding/x.py", "def f():\n    from ..training import cli"),
    (imports_point_down, "training/x.py", "from ..bench import timing"),
    (imports_point_down, "integrations/x.py", "from ..training.errors import CheckpointError"),
    (imports_point_down, "training/x.py", "from ..integrations import lightning"),
    (imports_are_relative, "sharding/x.py", "import kernels"),
    (imports_are_relative, "sharding/x.py", "from buffers.layout import FlatLayout"),
    (imports_are_relative, "bench/x.py", "import sidestream as ss"),
    (imports_point_down, "integrations/x.py", "from ..kernels import pack_"),
    (imports_point_down, "bench/x.py", "from ..integrations import lightning"),
    (adapted_packages_are_imported_by_their_file, "cli.py", "from .integrations import lightning"),
    (adapted_packages_are_imported_by_their_file, "sharding/x.py", "import transformers.trainer"),
    (adapted_packages_are_imported_by_their_file, "bench/x.py", "def f():\n    import peft"),
    (
        adapted_packages_are_imported_by_their_file,
        "integrations/lightning.py",
        "from transformers import Trainer",
    ),
    (
        adapted_packages_are_imported_by_their_file,
        "training/lightning.py",
        "from lightning.pytorch import Trainer",
    ),
    (private_names_stay_in_their_layer, "sharding/x.py", "from ..kernels.pack import _pack_kernel"),
    (private_names_stay_in_their_layer, "sharding/x.py", "from ..kernels._tables import table"),
    (kernels_and_buffers_know_no_ranks, "kernels/x.py", "import torch.distributed as dist"),
    (kernels_and_buffers_know_no_ranks, "kernels/x.py", "from torch import distributed"),
    (
        kernels_and_buffers_know_no_ranks,
        "buffers/x.py",
        "from torch.distributed.tensor import DTensor",
    ),
    (
        kernels_and_buffers_know_no_ranks,
        "buffers/x.py",
        "import torch\ntorch.distributed.get_rank()",
    ),
    (file_opens_with_a_docstring, "kernels/x.py", "import torch"),
    (file_is_short, "kernels/x.py", "a = 1\n" * (MAX_FILE_LINES + 1)),
    (functions_are_short, "kernels/x.py", LONG_FUNCTION),
    (functions_are_short, "kernels/x.py", JIT_LINES),
    (functions_take_few_positional_parameters, "sharding/x.py", "def f(a, b, c, d, e, f, g): ..."),
)

GOOD: tuple[tuple[Rule, str, str], ...] = (
    (imports_point_down, "bench/x.py", "from ..kernels import pack_\nfrom .timing import median"),
    (imports_point_down, "__init__.py", "from .sharding import fully_shard"),
    (
        adapted_packages_are_imported_by_their_file,
        "integrations/lightning.py",
        "from lightning.pytorch.strategies import DDPStrategy",
    ),
    (adapted_packages_are_imported_by_their_file, "integrations/x.py", "from . import lightning"),
    (private_names_stay_in_their_layer, "kernels/x.py", "from .pack import _pack_kernel"),
    (private_names_stay_in_their_layer, "sharding/x.py", "from .. import __version__"),
    (kernels_and_buffers_know_no_ranks, "sharding/x.py", "import torch.distributed as dist"),
    (functions_are_short, "kernels/x.py", "\n".join(JIT_LINES.split("\n")[:-2])),
    (functions_are_short, "kernels/x.py", 'def f():\n    """A."""\n' + "    a = 1\n" * 59),
    (functions_are_short, "kernels/x.py", 'def f():\n    """A\n' + "\n" * 60 + '    """\n'),
    (
        functions_take_few_positional_parameters,
        "sharding/x.py",
        "def f(a, *, b, c, d, e, f, g): ...",
    ),
)


def _package_sources() -> list[Source]:
    paths = [
        *ROOT.glob("*.py"),
        *(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")),
    ]
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted(paths)]


SOURCES = _package_sources()


def _name(value: object) -> str | None:
    return getattr(value, "__name__", None) or (value if isinstance(value, str) else None)


def test_every_layer_is_looked_at() -> None:
    assert {source.layer for source in SOURCES} == {None, *LAYERS}


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_package_keeps(rule: Rule) -> None:
    complaints = [f"{source.path}: {complaint}" for source in SOURCES for complaint in rule(source)]
    assert not complaints, "\n".join(["", *complaints])


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_complains_about(rule: Rule, path: str, text: str) -> None:
    assert len(rule(Source(path, text))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_accepts(rule: Rule, path: str, text: str) -> None:
    assert rule(Source(path, text)) == []


def test_every_rule_has_a_snippet_it_refuses() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)
