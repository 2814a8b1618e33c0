"""The temporary folder of a launcher: locked while it lives, removed by the next one if it was
killed.

    sidestream-ranks-XXXX/launcher.lock     held by flock, which ends with the process
                          rendezvous        where the ranks meet
                          rank-1.log        what a rank prints
                          beat-1, verdict   see `boards`
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "sidestream-ranks-"
_LOCK = "launcher.lock"


@contextmanager
def launch_folder() -> Iterator[Path]:
    """Give a new folder that is this process's own, and remove those of launchers that are gone."""
    _remove_left_behind(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Locked before it has the name that others look for.
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the folder is left alone
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(folder / "lock", folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left_behind(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_if_unlocked(folder)


def _remove_if_unlocked(folder: Path) -> None:
    # Without a lock of ours it is none of our folders, whatever its name.
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
