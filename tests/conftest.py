"""Set-up of all tests: this checkout as `sidestream`, poisoned memory, seeds, the `gpu` marker."""

import random
import runpy
import signal
from pathlib import Path

import pytest
import torch

runpy.run_path(str(Path(__file__).with_name("checkout.py")))["make_importable"]()

from sidestream.tests import poison  # noqa: E402  (importable only after the line above)

poison.install()

# A suite in the background of a shell ignores SIGINT, and so would the programs it interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


class _RootIsAFolder:
    """Keeps pytest from importing the root's `__init__.py` a second time, as a package of tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        is_root = path == Path(__file__).resolve().parents[1]
        return pytest.Dir.from_parent(parent, path=path) if is_root else None


def pytest_configure(config: pytest.Config) -> None:
    """Register what a conftest's own hooks cannot do: they hold below its folder only."""
    config.pluginmanager.register(_RootIsAFolder())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where pytest is alone, several of its processes share the tests by this."""
    parser.addoption(
        "--part", metavar="K/N", help="of the tests selected every N-th, from the K-th"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the part that is asked for; skip what is marked `gpu` where there is none."""
    if part := config.getoption("--part"):
        first, step = map(int, part.split("/"))
        items[:] = items[first::step]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)
