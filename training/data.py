"""The training text: which files it comes from, its split, and the batch that each (seed, step,
microbatch, rank) draws.

The sequences of a step are drawn for the whole step at once and then dealt out, so that neither
the number of ranks nor that of microbatches changes what a step learns from, and a resumed run
needs nothing but the number of its step:

    step's draw   [ s0 s1 | s2 s3 | s4 s5 | s6 s7 ]      batch 8, 2 microbatches, 2 ranks
    microbatch       0       0       1       1
    rank             0       1       0       1
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..sharding.storage import Location, Url, entries_of, is_url, location_of, read_first
from .errors import DataError, OptionsError

MIB = 1 << 20
MAX_CORPUS_BYTES = 64 * MIB
HELD_OUT_SHARE = 0.05
SNIFF_BYTES = 8192
STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
)
MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and bytes held out, as 1-D uint8 tensors, and where they came from.

    document_ends: int64, where each file ends in `train`; a file that is held out in part ends with
    it, one that is held out as a whole has no end there.
    """

    train: Tensor
    held_out: Tensor
    num_files: int
    source: str
    sha256: str
    document_ends: Tensor

    @property
    def num_bytes(self) -> int:
        """Length of both parts together."""
        return self.train.numel() + self.held_out.numel()


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a step's draw belongs to one rank: `batch` sequences in all, dealt to
    microbatches, then ranks.
    """

    batch: int
    accumulate: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        """Refuse a batch that cannot be dealt out evenly."""
        parts = self.accumulate * self.world_size
        if self.batch < 1 or self.batch % parts:
            raise OptionsError(
                f"expected a batch that {self.world_size} ranks x {self.accumulate} microbatches "
                f"divide, got {self.batch}; pass --batch "
                f"{max(1, round(self.batch / parts)) * parts}"
            )

    @property
    def sequences_per_microbatch(self) -> int:
        """Of one rank."""
        return self.batch // (self.accumulate * self.world_size)

    def rows(self, microbatch: int) -> slice:
        """Rows of the step's draw that this rank uses in `microbatch`."""
        size = self.sequences_per_microbatch
        start = (microbatch * self.world_size + self.rank) * size
        return slice(start, start + size)


def load_corpus(path: str | None, *, seq_len: int, max_bytes: int = MAX_CORPUS_BYTES) -> Corpus:
    """Read a file, or a folder's text files in sorted order, by path or URL; None reads the Python
    standard library's own sources.

    At most `max_bytes` are read. The last 5 %, or two sequences where that is more, are held out.

    Raises:
        DataError: nothing there, nothing readable, no text, or less than four sequences of it.
    """
    data = bytearray()
    ends = []
    for file in _text_files(path):
        data += _read(file, max_bytes - len(data))
        ends.append(len(data))
        if len(data) >= max_bytes:
            break
    source = path if path is not None else f"the Python standard library ({_stdlib_folder()})"
    window = seq_len + 1
    if len(data) < 4 * window:
        raise DataError(
            f"expected at least {4 * window} bytes of text (4 sequences of {seq_len} + 1), got "
            f"{len(data)} from {len(ends)} text files in {source}; pass --data with more text or "
            "a shorter --seq-len"
        )
    digest = hashlib.sha256(data).hexdigest()
    tokens = torch.frombuffer(data, dtype=torch.uint8)
    cut = len(data) - max(2 * window, int(len(data) * HELD_OUT_SHARE))
    train_ends = torch.tensor([*(end for end in ends if end < cut), cut])
    return Corpus(tokens[:cut], tokens[cut:], len(ends), source, digest, train_ends)


def draw_batch(
    corpus: Corpus, share: Share, *, seed: int, step: int, microbatch: int, seq_len: int
) -> Tensor:
    """Return this rank's sequences of one microbatch: int64 [sequences, seq_len + 1], inputs and
    targets overlapping.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, step))
    starts = torch.randint(corpus.train.numel() - seq_len, (share.batch,), generator=generator)
    return _windows(corpus.train, starts[share.rows(microbatch)], seq_len)


def held_out_batch(corpus: Corpus, share: Share, *, seq_len: int) -> Tensor:
    """Return this rank's part of `batch` evenly spaced held-out sequences: int64 [sequences,
    seq_len + 1].
    """
    starts = (
        torch.arange(share.batch)
        * (corpus.held_out.numel() - seq_len - 1)
        // max(1, share.batch - 1)
    )
    size = share.batch // share.world_size
    return _windows(corpus.held_out, starts[share.rank * size : (share.rank + 1) * size], seq_len)


def sent_to(device: torch.device, tokens: Tensor) -> Tensor:
    """Return `tokens` on `device`, enqueued: from memory that is not pinned the host would wait for
    all that the GPU was given before.
    """
    if device.type != "cuda":
        return tokens.to(device)
    return tokens.pin_memory().to(device, non_blocking=True)


def mix_seed(*numbers: int) -> int:
    """Fold numbers into one 63-bit seed, every bit depending on every number (the splitmix64
    finaliser, Steele 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
        state ^= state >> 31
    return state >> 1


def _windows(tokens: Tensor, starts: Tensor, seq_len: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(seq_len + 1)].long()


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _text_files(path: str | None) -> Iterator[Location]:
    if path is None:
        yield from _walk(_stdlib_folder(), suffix=".py", skipped=STDLIB_SKIPPED_FOLDERS)
        return
    if is_url(path):
        location = _located(path)
        if isinstance(location, Url):
            yield from _objects(location)
            return
        path = str(location)
    # Not the methods of Path, which raise where a path is too long.
    if os.path.isfile(path):
        yield Path(path)
    elif os.path.isdir(path):
        yield from filter(_looks_like_text, _walk(Path(path)))
    else:
        what = "something that is neither" if os.path.exists(path) else "nothing there"
        raise DataError(f"expected a file or a folder at --data {path}, got {what}; check the path")


def _located(url: str) -> Location:
    try:
        return location_of(url)
    except ValueError as error:
        raise DataError(f"--data: {error}") from error


def _objects(url: Url) -> Iterator[Location]:
    """Yield the object at `url`, or the text below it, each looked at when its turn comes."""
    found: Location | None = None
    try:
        for found in [url] if url.is_file() else filter(_looks_like_text, _below(url)):
            yield found
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"expected text at --data {url}, got {error}; check the URL and its credentials"
        ) from error
    if found is None:
        raise DataError(f"expected text at --data {url}, got nothing there; check the URL")


def _below(folder: Url) -> Iterator[Url]:
    """Yield all below `folder` in the order of `_walk`, hidden names left out."""
    found = {name: is_folder for name, is_folder in entries_of(folder).items() if name[0] != "."}
    for name in sorted(found, key=lambda name: (found[name], name)):
        if found[name]:
            yield from _below(folder / name)
        else:
            yield folder / name


def _walk(root: Path, *, suffix: str = "", skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the regular files below root, names sorted in each folder, hidden ones left out, links
    not followed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(
            f"expected a readable folder, got {error}; check the permissions below --data"
        ) from error

    for folder, names, files in os.walk(root, onerror=refuse):
        names[:] = sorted(
            name for name in names if not name.startswith(".") and name not in skipped
        )
        for name in sorted(files):
            file = Path(folder, name)
            if (
                name.endswith(suffix)
                and not name.startswith(".")
                and file.is_file()
                and not file.is_symlink()
            ):
                yield file


def _looks_like_text(file: Location) -> bool:
    return b"\0" not in _read(file, SNIFF_BYTES)


def _read(file: Location, max_bytes: int) -> bytes:
    try:
        return read_first(file, max_bytes)
    except (OSError, ValueError) as error:
        raise DataError(
            f"expected a readable file, got {error}; check the permissions below --data"
        ) from error
