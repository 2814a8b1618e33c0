"""Owns what the tests of kernels share: the processes that run beside them, and the table."""

from collections.abc import Callable, Iterator

import pytest

from sidestream.tests.kernels import compile_ahead, costs, interpreter


@pytest.fixture(scope="session", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[Callable | None]:
    """The run of `interpreted/`: it takes a core while the other tests here compile on another."""
    if not any(item.path.name == "test_interpreted.py" for item in request.session.items):
        yield None
        return
    with interpreter.running() as result:
        yield result


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the tests compile, made in part before they ask for it."""
    modules = dict.fromkeys(item.getparent(pytest.Module) for item in request.session.items)
    names = [module.path.stem for module in modules if hasattr(module.obj, "compiled_ahead")]
    with compile_ahead.running([f"sidestream.tests.kernels.{name}" for name in names]):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the compiled kernels cost, beside what they may."""
    lines = costs.table_lines()
    if lines:
        terminalreporter.section("kernels compiled for sm_90")
        terminalreporter.write_line("\n".join(lines))
