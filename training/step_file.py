"""The file beside a checkpoint: which run and step it is of, and what its index is bound to.

    {"format_version": 2, "step": 20, "world_size": 2, "loss_first": 5.5, "defining": {...},
     "index_sha256": "...", "content_sha256": "..."}

It is written last. The first checksum is that of `sidestream.json` in the folder, which has those
of all other files there; the second is that of all before it. Whatever else it may be, a pipe, a
device, other JSON, is refused in one sentence, and nothing waits for it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from ..sharding.storage import Location, read_first, write_whole
from ..sharding.untrusted import parse_object
from .errors import CheckpointError

FORMAT_VERSION = 2
STEP_DIGITS = 8
MAX_STEP_FILE_BYTES = 1 << 20
MAX_INDEX_BYTES = 1 << 30
CHECKSUM = "content_sha256"
# In a folder of `save_checkpoint`, what describes all its other files.
INDEX_FILE = "sidestream.json"
SHA256_DIGITS = 64

Defining = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A complete checkpoint: where it is, after which step, 0 before the first, and of which run.

    `index_sha256` is what the file beside it says of its folder; empty until that is read, and
    where the folder was being replaced.
    """

    path: Location
    step: int
    world_size: int
    loss_first: float
    defining: Defining
    index_sha256: str = field(default="", compare=False)


def step_file_of(path: Location) -> Location:
    """The file beside the checkpoint at `path`."""
    return path.with_name(f"{path.name}.json")


def write_step_file(saved: SavedRun, *, is_being_replaced: bool = False) -> None:
    """Write the file that makes the checkpoint at `saved.path` complete, also after a power cut;
    or that says, of one that is complete, that it is being replaced.
    """
    loss = saved.loss_first
    content = {
        "format_version": FORMAT_VERSION,
        "step": saved.step,
        "world_size": saved.world_size,
        "loss_first": loss if math.isfinite(loss) else str(loss),  # JSON has no such number
        "defining": dict(saved.defining),
        "index_sha256": "" if is_being_replaced else sum_of_index(saved.path),
    }
    text = json.dumps(sealed(content), indent=2, allow_nan=False) + "\n"
    write_whole(step_file_of(saved.path), text.encode("utf-8"))


def read_step_file(path: Location) -> SavedRun:
    """Read the file beside the checkpoint at `path`; what it says of the folder is not compared.

    Raises:
        CheckpointError: it is not what `write_step_file` writes, or of another step.
    """
    file = step_file_of(path)
    try:
        content = parse_object(_content_of(file))
        _require_keys(content)
        saved = SavedRun(
            path=path,
            step=_whole(content, "step", least=0),
            world_size=_whole(content, "world_size"),
            loss_first=_loss(content["loss_first"]),
            defining=_defining(content["defining"]),
            index_sha256=_sum(content["index_sha256"]),
        )
        if path.name != folder_name(saved.step):
            raise ValueError(f"step {saved.step}, which belongs to {folder_name(saved.step)}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"expected {file} as this release writes it, got {_in_words(error)}; move it away to "
            "resume from an older one"
        ) from error
    return saved


def require_same_index(saved: SavedRun) -> None:
    """Compare the folder of `saved`, which was read, with what the file beside it said.

    Raises:
        CheckpointError: the folder's index is missing or another one.
    """
    try:
        now = sum_of_index(saved.path)
    except (OSError, ValueError) as error:
        raise _other_index(saved.path, _in_words(error)) from error
    if saved.index_sha256 and now != saved.index_sha256:
        raise _other_index(saved.path, f"{INDEX_FILE} with another checksum")


def sum_of_index(path: Location) -> str:
    """SHA-256 of the file in `path` that describes all its other files.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is no regular file.
    """
    return hashlib.sha256(read_first(path / INDEX_FILE, MAX_INDEX_BYTES)).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with its checksum."""
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    encoded = json.dumps(rest, sort_keys=True).encode()
    return {**rest, CHECKSUM: hashlib.sha256(encoded).hexdigest()}


def folder_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:0{STEP_DIGITS}d}"


def _content_of(file: Location) -> bytes:
    content = read_first(file, MAX_STEP_FILE_BYTES + 1)
    if len(content) > MAX_STEP_FILE_BYTES:
        raise ValueError(f"more than {MAX_STEP_FILE_BYTES} bytes")
    return content


def _require_keys(content: Mapping[str, Any]) -> None:
    if content.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(f"format_version {short(content['format_version'])}, not {FORMAT_VERSION}")
    expected = {*SavedRun.__slots__, "format_version", CHECKSUM} - {"path"}
    if wrong := sorted(expected ^ {*content}):
        raise ValueError(f"missing or unknown names: {short(wrong)}")
    if sealed(content) != content:
        raise ValueError(f"another {CHECKSUM} than its own: it was changed")


def _whole(content: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = content[name]
    if type(value) is not int or not least <= value < 10**STEP_DIGITS:
        raise ValueError(f"{name} {short(value)}")
    return value


def _loss(value: object) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    raise ValueError(f"loss_first {short(value)}")


def _defining(value: object) -> dict[str, str | int | float]:
    if not isinstance(value, dict) or not all(
        type(part) in (str, int, float) for part in value.values()
    ):
        raise ValueError("a defining that is no object of texts and numbers")
    return value


def _sum(value: object) -> str:
    if not isinstance(value, str) or len(value) not in (0, SHA256_DIGITS):
        raise ValueError(f"index_sha256 {short(value)}")
    return value


def _other_index(path: Location, text: str) -> CheckpointError:
    return CheckpointError(
        f"expected the checkpoint {path} as it was saved, got another one ({text}); move "
        f"{step_file_of(path)} away to resume from an older one"
    )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, UnicodeError) else str(error)
