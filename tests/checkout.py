"""Makes this checkout importable as `sidestream` where it is not installed; itself run by path."""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path


def make_importable() -> None:
    """Put a link `sidestream -> checkout` first on the path, of child processes too."""
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.find_spec("sidestream")
    if spec is not None and spec.origin and Path(spec.origin).resolve().parent == root:
        return
    folder = tempfile.mkdtemp(prefix="sidestream-checkout-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.symlink(root, Path(folder) / "sidestream")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.getenv("PYTHONPATH")]))
