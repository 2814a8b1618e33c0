"""Where ranks leave their beats and read those of others: a file each, or the ranks' TCPStore.

    FolderBoard    beside our launcher, in its folder: no port, and it outlives every rank
    StoreBoard     under torchrun and the like, which have a store and no folder that all share

A beat is a counter and where its rank stands. The verdict, the sentence that says why all ranks
end, is written once: the first one stays.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

BEAT_BYTES = 512
LONG_S = 10
_VERDICT = "verdict"


@dataclass(frozen=True, slots=True)
class Beat:
    """`count` grows with every beat; the rank has been `doing` this for `doing_s` seconds."""

    count: int
    doing_s: int
    doing: str

    def place(self) -> str:
        """Where the rank stands, and for how long where that is long."""
        return self.doing if self.doing_s < LONG_S else f"{self.doing} for {self.doing_s} s"

    def encoded(self) -> bytes:
        """The beat as at most `BEAT_BYTES` bytes."""
        return f"{self.count} {self.doing_s} {self.doing}".encode(errors="replace")[:BEAT_BYTES]


def beat_from(content: bytes) -> Beat | None:
    """The beat that was `encoded`, None where it is not whole yet."""
    parts = content.decode(errors="replace").strip().split(" ", 2)
    if not all(part.isdecimal() for part in parts[:2]):
        return None
    return Beat(int(parts[0]), int(parts[1]), parts[2]) if len(parts) > 2 else None  # noqa: PLR2004


class Board(Protocol):
    """What ranks write to and read from; a RuntimeError or OSError says that it is out of reach.

    `name`: where it is, for messages.
    """

    name: str

    def post(self, rank: int, beat: Beat) -> None:
        """Leave a beat in place of the rank's last one."""

    def beats(self, ranks: Iterable[int]) -> Mapping[int, Beat]:
        """The last beats of `ranks`, without those that never had one."""

    def judge(self, verdict: str) -> None:
        """Leave the verdict, if there is none."""

    def verdict(self) -> str:
        """The verdict; empty while there is none."""


class FolderBoard:
    """A file a rank, written in place: a full disk stops no beat."""

    def __init__(self, folder: Path) -> None:
        self.name = f"the folder {folder}"
        self._folder = folder
        self._descriptors: dict[int, int] = {}

    def post(self, rank: int, beat: Beat) -> None:
        """Leave a beat in place of the rank's last one."""
        if rank not in self._descriptors:
            self._descriptors[rank] = os.open(self._file(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(self._descriptors[rank], beat.encoded().ljust(BEAT_BYTES), 0)

    def beats(self, ranks: Iterable[int]) -> Mapping[int, Beat]:
        """The last beats of `ranks`, without those that never had one."""
        found = {}
        for rank in ranks:
            with contextlib.suppress(FileNotFoundError):
                beat = beat_from(self._file(rank).read_bytes())
                if beat is not None:
                    found[rank] = beat
        return found

    def judge(self, verdict: str) -> None:
        """Leave the verdict, if there is none."""
        # Written elsewhere, then given its name, if that is free: nobody reads half of it.
        written = self._folder / f"{_VERDICT}.{os.getpid()}.{threading.get_ident()}"
        try:
            written.write_text(verdict, encoding="utf-8", errors="replace")
            _name(written, self._folder / _VERDICT)
        finally:
            written.unlink(missing_ok=True)

    def verdict(self) -> str:
        """The verdict; empty while there is none."""
        try:
            return (self._folder / _VERDICT).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _file(self, rank: int) -> Path:
        return self._folder / f"beat-{rank}"


def _name(written: Path, name: Path) -> None:
    """Have the file `written` under `name` too, unless there is one; raises OSError."""
    try:
        os.link(written, name)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links: the text is short enough for one write
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                os.write(descriptor, written.read_bytes())
            finally:
                os.close(descriptor)


class StoreBoard:
    """Keys of the store in which the ranks meet, over a connection of its own: that of the process
    group is taken while a rank waits in it.
    """

    def __init__(self, store: dist.Store, name: str = "the ranks' store") -> None:
        self.name = name
        self._store = store
        self._seen: set[int] = set()

    def post(self, rank: int, beat: Beat) -> None:
        """Leave a beat in place of the rank's last one."""
        self._store.set(self._key(rank), beat.encoded().decode(errors="replace"))

    def beats(self, ranks: Iterable[int]) -> Mapping[int, Beat]:
        """The last beats of `ranks`, without those that never had one."""
        asked = list(ranks)
        # To ask for a key that is not there would wait for it.
        self._seen |= {
            rank
            for rank in asked
            if rank not in self._seen and self._store.check([self._key(rank)])
        }
        known = [rank for rank in asked if rank in self._seen]
        contents = self._store.multi_get([self._key(rank) for rank in known]) if known else []
        beats = {rank: beat_from(content) for rank, content in zip(known, contents, strict=True)}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def judge(self, verdict: str) -> None:
        """Leave the verdict, if there is none."""
        self._store.compare_set(_VERDICT, "", verdict)

    def verdict(self) -> str:
        """The verdict; empty while there is none."""
        if not self._store.check([_VERDICT]):
            return ""
        return self._store.get(_VERDICT).decode(errors="replace")

    def _key(self, rank: int) -> str:
        return f"beat-{rank}"


def board_of_store(environ: Mapping[str, str], rank: int, timeout_s: float) -> StoreBoard:
    """Open the store at MASTER_ADDR:MASTER_PORT, where `init_method="env://"` meets.

    Raises:
        RuntimeError: there is none after `timeout_s`.
        KeyError, ValueError: the environment does not say where.
    """
    is_host = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = dist.TCPStore(
        host,
        port,
        is_master=is_host,
        timeout=timedelta(seconds=timeout_s),
        # Who waits for all to be there cannot tell who is not.
        wait_for_workers=False,
        # The process group opens the same port in the same process.
        multi_tenant=is_host,
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"sidestream/{attempt}", store)
    return StoreBoard(prefixed, f"the ranks' store at {host}:{port}")
