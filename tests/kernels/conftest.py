"""What the tests of kernels share: the processes that run beside them, and the table."""

import contextlib
from collections.abc import Callable

import pytest

from sidestream.tests.kernels import compile_ahead, costs, interpreter

_beside = contextlib.ExitStack()
_interpreted: list[Callable[[], tuple[int, str]]] = []
# They wait for what runs beside, or look back at what all others measured.
_LAST = ("test_interpreted.py", "test_registry.py")


def _turn(item: pytest.Item) -> int:
    module = item.getparent(pytest.Module)
    assert module is not None
    return 2 if module.path.name in _LAST else int(hasattr(module.obj, "compiled_ahead"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what is compiled ahead after all other tests, in whose time most of it is compiled."""
    items.sort(key=_turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what takes a core while other tests wait: the interpreter's run, and compilations."""
    if session.config.option.collectonly:
        return
    modules = dict.fromkeys(item.getparent(pytest.Module) for item in session.items)
    names = [
        f"sidestream.{module.obj.__name__}"
        for module in modules
        if hasattr(module.obj, "compiled_ahead")
    ]
    if names:
        _beside.enter_context(compile_ahead.running(names))
    if any(module.path.name == "test_interpreted.py" for module in modules):
        _interpreted.append(_beside.enter_context(interpreter.running()))


def pytest_sessionfinish() -> None:
    """End what still runs."""
    _beside.close()


@pytest.fixture
def interpreted() -> Callable[[], tuple[int, str]]:
    """The run of `interpreted/`."""
    return _interpreted[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the compiled kernels cost, beside what they may."""
    lines = costs.table_lines()
    if lines:
        terminalreporter.section("kernels compiled for sm_90")
        terminalreporter.write_line("\n".join(lines))
