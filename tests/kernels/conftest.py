"""What the tests of kernels share: the processes that run beside them."""

import contextlib
from collections.abc import Callable

import pytest

from sidestream.tests.kernels import compiling, interpreter

_beside = contextlib.ExitStack()
_interpreted: list[Callable[[], tuple[int, str]]] = []


def _module(item: pytest.Item) -> pytest.Module:
    module = item.getparent(pytest.Module)
    assert module is not None
    return module


def _turn(item: pytest.Item) -> int:
    """What compiles comes late, and what waits for the interpreter last."""
    module = _module(item)
    return 2 if module.path.name == "test_interpreted.py" else int(hasattr(module.obj, "TASKS"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what is compiled beside after all other tests, in whose time most of it is compiled."""
    items.sort(key=_turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin what takes a core while other tests wait: the interpreter's run, and compilations."""
    if session.config.option.collectonly:
        return
    modules = dict.fromkeys(map(_module, session.items))
    tasks = [task for module in modules for task in getattr(module.obj, "TASKS", ())]
    if tasks:
        _beside.enter_context(compiling.beside(tasks))
    if any(module.path.name == "test_interpreted.py" for module in modules):
        _interpreted.append(_beside.enter_context(interpreter.running()))


def pytest_sessionfinish() -> None:
    """End what still runs."""
    _beside.close()


@pytest.fixture
def interpreted() -> Callable[[], tuple[int, str]]:
    """The run of `interpreted/`."""
    return _interpreted[0]
