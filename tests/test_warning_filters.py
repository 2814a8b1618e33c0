"""Which warnings are errors: all of ours, and of other packages all but those of compiling them."""

import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# An invalid escape, such as an installed package without cached byte code may have.
SOURCE = r"'\.'"


@pytest.mark.parametrize("folder", ["kernels", "tests/kernels"])
def test_our_own_sources_compile_without_warnings(folder):
    with pytest.raises(SyntaxError, match="invalid escape"):
        compile(SOURCE, str(ROOT / folder / "any.py"), "exec")


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_other_packages_may_warn_when_they_are_compiled(packages):
    compile(SOURCE, f"/usr/lib/python3/{packages}/other/any.py", "exec")


@pytest.mark.parametrize("category", [DeprecationWarning, SyntaxWarning])
def test_other_packages_may_not_warn_when_they_run(category):
    with pytest.raises(category, match="old"):
        warnings.warn_explicit("old", category, "/lib/site-packages/other/any.py", 1, "other.any")
