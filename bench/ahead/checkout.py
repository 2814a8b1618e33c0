"""Another commit of this checkout, put into a temporary folder and asked about its kernels."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...training.errors import UsageError
from .measuring import SCHEMA_VERSION, Row, row_from_json

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "bench/commands/inspect.py"


class CompareError(UsageError):
    """The commit cannot be looked at."""


def commit_of(ref: str) -> str:
    """The commit that `ref` names in this checkout, which has the command.

    Raises:
        CompareError: this is no checkout, there is no such commit, or it is too old.
    """
    if _git("rev-parse", "--show-prefix").stdout != b"\n":
        raise CompareError(
            f"--compare: expected sidestream in a git checkout, got {ROOT}; "
            "clone the repository and install it with pip install -e ."
        )
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if found.returncode:
        raise CompareError(
            f"--compare: expected a commit, branch or tag of {ROOT}, got {ref!r}; "
            "`git log --oneline` shows some"
        )
    commit = found.stdout.decode().strip()
    if _git("cat-file", "-e", f"{commit}:{COMMAND}").returncode:
        raise CompareError(
            f"--compare: expected a commit that has `sidestream inspect`, got {ref!r} "
            f"({commit[:10]}); choose one since {COMMAND} is there"
        )
    return commit


def rows_at(commit: str, arguments: Sequence[str], text: str | None) -> tuple[Row, ...]:
    """The rows that `sidestream inspect ARGUMENTS` of that commit has, compiled by what is here:
    those with `text` in their case's name, if it is given.

    Raises:
        CompareError: the commit cannot be read, or the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="sidestream-inspect-") as folder:
        archive = _git("archive", "--format=tar", commit)
        if archive.returncode:
            reason = archive.stderr.decode(errors="replace").strip()
            raise CompareError(
                f"--compare: expected git to read all of {commit[:10]}, got exit code "
                f"{archive.returncode} ({reason}); see what `git fsck` says, or fetch it again"
            )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(Path(folder) / "sidestream", filter="data")
        result = Path(folder) / "result.json"
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, "-m", "sidestream", "inspect", *arguments, "--json", str(result)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise CompareError(
                f"--compare: expected the command of {commit[:10]} to end well, got exit code "
                f"{done.returncode}; its error is above"
            )
        content = json.loads(result.read_text())
    if content["schema_version"] != SCHEMA_VERSION:
        raise CompareError(
            f"--compare: expected rows of version {SCHEMA_VERSION} of {commit[:10]}, got version "
            f"{content['schema_version']}; choose a later commit"
        )
    rows = map(row_from_json, content["rows"])
    return tuple(row for row in rows if text is None or text in row.case)


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, check=False
        )
    except FileNotFoundError:
        raise CompareError("--compare: expected git on the PATH, got none; install it") from None
