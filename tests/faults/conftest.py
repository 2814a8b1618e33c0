from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.tests.faults.runs import Unbroken


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return ["--data", str(path)]


@pytest.fixture(scope="session")
def unbroken(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The checksum of the parameters with which a run ends that nothing disturbs."""
    return Unbroken(text, tmp_path_factory.mktemp("unbroken")).sha256


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "saved"
