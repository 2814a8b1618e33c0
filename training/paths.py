"""Whether a run can write where it is told to, found before it starts and not when it is over."""

import os
import secrets
import tempfile
from pathlib import Path

from ..sharding.storage import Location, Url, is_url, location_of, make_folder, write_whole
from .errors import OptionsError


def require_writable_file(path: str, option: str) -> None:
    """Refuse a file that cannot be written; nothing is.

    Raises:
        OptionsError: it is a URL, a folder, or lies in none, or this user must not.
    """
    _require_no_url(path, option)
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
        OptionsError: it is a URL, cannot be made, or this user must not write there.
    """
    _require_no_url(path, option)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except (OSError, ValueError) as error:
        raise _not_writable(path, option, error) from error


def require_writable_place(path: str, option: str) -> None:
    """`require_writable_folder` that also takes a URL below which objects can be written.

    Raises:
        OptionsError: they cannot, or would be gone with the process.
    """
    if not is_url(path):
        require_writable_folder(path, option)
        return
    try:
        location = location_of(path)
        if isinstance(location, Url) and location.protocol == "memory":
            raise ValueError("memory:// lasts as long as one process")
        _write_and_remove(location)
    except (OSError, ValueError) as error:
        raise _not_writable(path, option, error) from error


def _require_no_url(path: str, option: str) -> None:
    if is_url(path):
        raise OptionsError(
            f"expected a path on this machine for {option}, got the URL {path}; name a path, and "
            "copy what is there once the run is over: only --data and --checkpoint take URLs"
        )


def _write_and_remove(folder: Location) -> None:
    make_folder(folder)
    probe = folder / f".sidestream-{secrets.token_hex(8)}"  # ranks may look at the same time
    write_whole(probe, b"sidestream")
    probe.unlink()


def _not_writable(path: str, option: str, error: Exception) -> OptionsError:
    return OptionsError(
        f"expected a place to write to for {option}, got {path}: {error}; give another path"
    )
