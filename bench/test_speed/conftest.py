"""Set-up of `pytest bench/ --benchmark-only`: this checkout as `sidestream`, imported once.

These files lie in a folder that is no package: pytest would else import the packages above them
under the name of the checkout's folder, whatever that is, and with them every op a second time.
"""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
runpy.run_path(str(ROOT / "tests" / "checkout.py"))["make_importable"]()


class _PackagesAreFolders:
    """Keeps pytest from importing the `__init__.py` of the root and of `bench` by itself."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        if path in (ROOT, ROOT / "bench"):
            return pytest.Dir.from_parent(parent, path=path)
        return None


def pytest_configure(config: pytest.Config) -> None:
    """A conftest's own hooks hold below its folder only."""
    config.pluginmanager.register(_PackagesAreFolders())
