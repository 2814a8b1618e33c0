"""Owns what the tests of kernels share: the interpreter's run, begun early, and the table."""

from collections.abc import Callable, Iterator

import pytest

from sidestream.tests.kernels import costs, interpreter


@pytest.fixture(scope="session", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[Callable | None]:
    """The run of `interpreted/`: it takes a core while the other tests here compile on another."""
    if not any(item.path.name == "test_interpreted.py" for item in request.session.items):
        yield None
        return
    with interpreter.running() as result:
        yield result


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the tests of a file compile, made in part before they ask for it."""
    with costs.ahead(getattr(request.module, "compiled_ahead", list)()):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the compiled kernels cost, beside what they may."""
    lines = costs.table_lines()
    if lines:
        terminalreporter.section("kernels compiled for sm_90")
        terminalreporter.write_line("\n".join(lines))
