"""Tests of what gets installed: every module, the type marker, and no top-level `kernels`."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_PACKAGES = ("tests", "docs", "examples", "build", "dist", "test_speed")


def _package_folders() -> list[Path]:
    """Every folder with an `__init__.py`, the root first; tests stay out."""
    inner = sorted(path.parent for path in ROOT.glob("[a-z]*/**/__init__.py"))
    return [ROOT, *(folder for folder in inner if _is_ours(folder))]


def _is_ours(folder: Path) -> bool:
    return not set(folder.relative_to(ROOT).parts) & set(NOT_PACKAGES)


def _package_name(folder: Path) -> str:
    return ".".join(["sidestream", *folder.relative_to(ROOT).parts])


def test_package_is_imported_once() -> None:
    init = str(ROOT / "__init__.py")
    modules = [name for name, module in sys.modules.items() if _file(module) == init]
    assert modules == ["sidestream"]


def _file(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file else None


def test_packages_are_complete() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(_package_name(folder) for folder in _package_folders())


def test_every_folder_with_sources_is_a_package() -> None:
    folders = {path.parent for path in ROOT.glob("[a-z]*/**/*.py")}
    sources = {folder for folder in folders if _is_ours(folder)}
    assert sources == set(_package_folders()) - {ROOT}


def test_types_are_checked_in_every_package() -> None:
    mypy = PYPROJECT["tool"]["mypy"]
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    # A package is checked with those in it, and mypy takes none of them twice.
    outer = [name for name in listed if name.count(".") <= 1]
    assert sorted([*mypy["modules"], *mypy["packages"]]) == sorted(outer)


@pytest.mark.slow
def test_wheel_holds_every_module_and_the_type_marker(tmp_path: Path) -> None:
    pytest.importorskip(
        "setuptools", minversion="77", reason="builds with what is installed, offline"
    )
    # A copy by links, so that setuptools leaves its build folders there and not in the checkout.
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("build", "dist") and path.suffix != ".egg-info":
            (copy / path.name).symlink_to(path)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    modules = {
        f"sidestream/{path.relative_to(ROOT).as_posix()}"
        for folder in _package_folders()
        for path in folder.glob("*.py")
    }
    names = zipfile.ZipFile(wheel).namelist()
    installed = {name for name in names if ".dist-info/" not in name}
    assert {name for name in installed if name.endswith(".py")} == modules
    assert "sidestream/py.typed" in installed
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in installed} == {"sidestream"}


def test_layers_are_not_importable_by_their_bare_names(tmp_path: Path) -> None:
    layers = [folder.name for folder in _package_folders() if folder.parent == ROOT]
    script = (
        "import importlib.util, sidestream, sys\n"
        f"specs = map(importlib.util.find_spec, {layers!r})\n"
        "print([s.origin for s in specs if s and (s.origin or '').startswith(sys.argv[1])])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr
