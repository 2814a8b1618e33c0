"""Whether a run can write where it is told to, found before it starts and not when it is over."""

import os
import tempfile
from pathlib import Path

from .errors import OptionsError


def require_writable_file(path: str, option: str) -> None:
    """Refuse a file that cannot be written; nothing is.

    Raises:
        OptionsError: it is a folder, or lies in none, or this user must not.
    """
    if os.path.isdir(path):
        raise OptionsError(f"expected a file for {option}, got the folder {path}; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise OptionsError(
            f"expected {option} in a folder that exists, got {path}; make the folder first"
        )
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # a pipe without a reader would block
    except FileNotFoundError:
        require_writable_folder(str(Path(path).absolute().parent), option)
    except (OSError, ValueError) as error:
        raise _not_writable(path, option, error) from error


def require_writable_folder(path: str, option: str) -> None:
    """Refuse a folder in which no file can be made; makes the folder.

    Raises:
        OptionsError: it cannot be made, or this user must not write there.
    """
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except (OSError, ValueError) as error:
        raise _not_writable(path, option, error) from error


def _not_writable(path: str, option: str, error: Exception) -> OptionsError:
    return OptionsError(
        f"expected a place to write to for {option}, got {path}: {error}; give another path"
    )
