"""The folder of an export in the layout of Hugging Face, and how a new export replaces another.

    model.safetensors                            a model of one file
    model-00001-of-00003.safetensors, ...        one of several, and
    model.safetensors.index.json                 their index
    .model...partial                             what is being written
    model-00001-of-00003.replaced.safetensors    a file of the one before, while its name changes

The folder stays, since other files lie in it. So names change one by one, in an order in which the
folder reads as the old export up to one of them and as the new one from it on, also where a kill
ends it in between. Readers take a single file before an index.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ..untrusted import sync_folder
from .files import OpenFile, read_index
from .format import INDEX, SINGLE, Export, build_index, parse_text

_SHARD = re.compile(r"model-\d{5}-of-\d{5}(\.replaced)?\.safetensors")
_PARTIAL = re.compile(r"\.model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\.partial")


class ExportFolder:
    """The folder `target` that gets `export`; one process uses it."""

    def __init__(self, target: Path, export: Export) -> None:
        self._target = target
        self._export = export
        self._names = [file.name for file in export.files]

    def prepare(self) -> None:
        """Make the folder, and remove what a kill left.

        Raises:
            FileExistsError: what has a name of the export is no file.
            OSError: the folder cannot be made or written to.
        """
        for place, expected in self._obstacles():
            raise FileExistsError(
                f"path: expected {expected} at {place}, got something else; give another path"
            )
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            self.discard_partials()
            self._create(self._partial_index, b"")
            self._partial_index.unlink()
        except OSError as error:
            raise OSError(
                f"path: expected a folder that this user can write to, got {self._target}, where "
                f"that fails ({error}); give another path"
            ) from error

    def _obstacles(self) -> list[tuple[Path, str]]:
        target = self._target
        if target.exists() and not target.is_dir():
            return [(target, "a folder or nothing")]
        names = [SINGLE, INDEX, *self._names]
        return [(target / n, "a file or nothing") for n in names if (target / n).is_dir()]

    def partial(self, name: str) -> Path:
        """Where what will be called `name` is written to."""
        return self._target / f".{name}.partial"

    @property
    def _partial_index(self) -> Path:
        return self.partial(INDEX)

    def publish(self) -> None:
        """Put what was written in its place, and remove the export that was there.

        Raises:
            OSError: a file cannot be renamed or removed.
        """
        target = self._target
        if self._export.index is None:
            self.partial(SINGLE).replace(target / SINGLE)
        else:
            self._set_aside()
            for name in self._names:
                self.partial(name).replace(target / name)
            self._replace_index(self._export.index)
            (target / SINGLE).unlink(missing_ok=True)
        sync_folder(target)
        self._remove_others()

    def _set_aside(self) -> None:
        """Have an old index name its files otherwise, where the new ones take their names."""
        try:
            with contextlib.closing(OpenFile(self._target / INDEX)) as file:
                content, weight_map = read_index(file)
        except (OSError, ValueError):  # nothing that could be read
            return
        aside = {
            name: name.replace(".safetensors", ".replaced.safetensors")
            for name in set(weight_map.values()) & set(self._names)
        }
        whole = all((self._target / name).exists() for name in set(weight_map.values()))
        if not (aside and whole):
            return
        for name, other in aside.items():
            self._duplicate(name, other)
        metadata = parse_text(content, "index").get("metadata", {})
        moved = {tensor: aside.get(file, file) for tensor, file in weight_map.items()}
        self._replace_index(build_index(metadata, moved))

    def _duplicate(self, name: str, other: str) -> None:
        """Have the file `name` under the name `other` too."""
        source, copy = self._target / name, self._target / other
        copy.unlink(missing_ok=True)
        try:
            copy.hardlink_to(source.resolve())
        except OSError:  # on another disk, or a file system without links
            shutil.copyfile(source, copy)

    def _replace_index(self, content: bytes) -> None:
        partial = self._partial_index
        partial.unlink(missing_ok=True)
        self._create(partial, content)
        sync_folder(self._target)
        partial.replace(self._target / INDEX)
        sync_folder(self._target)

    @staticmethod
    def _create(path: Path, content: bytes) -> None:
        with path.open("xb") as file:  # exclusively: no planted link is followed
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _remove_others(self) -> None:
        """Remove what an export named before and this one does not."""
        if self._export.index is None:
            (self._target / INDEX).unlink(missing_ok=True)
        self._remove(_SHARD, keep=self._names)

    def discard_partials(self) -> None:
        """Remove what was written and not published, if anything was; raises nothing."""
        with contextlib.suppress(OSError):
            self._remove(_PARTIAL)

    def _remove(self, pattern: re.Pattern[str], keep: list[str] | None = None) -> None:
        for name in os.listdir(self._target):
            if pattern.fullmatch(name) and name not in (keep or []):
                (self._target / name).unlink()
