"""What one rank says of itself to others that wait for it: where its main thread stands, in which
collectives, what it did last. Text of bounded length, made without any collective or lock, and
without a question to a GPU that could spoil a graph which is being captured.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch

_SAID, _SAID_CHARS = 4, 160
"""How many of each kind are said, and how long each may be."""
_ENDINGS = dict.fromkeys("XZ", "has ended") | dict.fromkeys("Tt", "is stopped, as by SIGSTOP")
"""By the letter that Linux has for the state of a process, X where there is none."""
_STDLIB = f"{Path(threading.__file__).parent}{os.sep}"
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        *(Path(__file__).parent.parent / layer for layer in ("sharding", "buffers", "kernels")),
    )
)


@dataclass(frozen=True, slots=True)
class AwaitedCollective:
    """A collective in which a rank has stood for `lasting_s` seconds. `number`: of its kind, in the
    order of use, and `model`: of those that the ranks have sharded; -1 where it is not counted.
    `ranks`: global, of those that take part, where they are known. `peer`: " from" or " to" which
    rank, if one alone is waited for.
    """

    what: str
    number: int
    lasting_s: float
    ranks: tuple[int, ...] = ()
    peer: str = ""
    model: int = -1


@dataclass(frozen=True, slots=True)
class Account:
    """`rank`: global. `host`: also tells namespaces of processes apart. `place`: where the main
    thread stands, innermost first. `doing`: of its models. `waits`: the longest first. `events`:
    the last ones, oldest first.
    """

    rank: int
    host: str
    pid: int
    place: str
    doing: str
    waits: tuple[AwaitedCollective, ...] = ()
    events: tuple[str, ...] = ()

    def encoded(self) -> str:
        """As text of some KiB at most."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        parts = [f"rank {self.rank}: {self.doing}; at {self.place}"]
        parts += [
            f"waits in {wait.what}{wait.peer} for {wait.lasting_s:.1f} s" for wait in self.waits
        ]
        if self.events:
            parts.append(f"last: {', '.join(self.events)}")
        return "; ".join(parts)


def account_of(
    rank: int, doing: str, waits: Sequence[AwaitedCollective], events: Sequence[str]
) -> Account:
    """That of this process, cut to a bounded length."""
    return Account(
        rank=rank,
        host=_host(),
        pid=os.getpid(),
        place=main_thread_place(),
        doing=doing[:_SAID_CHARS],
        waits=tuple(
            replace(wait, what=wait.what[:_SAID_CHARS])
            for wait in sorted(waits, key=lambda wait: -wait.lasting_s)[:_SAID]
        ),
        events=tuple(event[:_SAID_CHARS] for event in events[-_SAID:]),
    )


def decoded(text: str) -> Account:
    """The account that was `encoded`."""
    said = json.loads(text)
    waits = tuple(
        AwaitedCollective(**{**wait, "ranks": tuple(wait["ranks"])}) for wait in said["waits"]
    )
    return Account(**{**said, "waits": waits, "events": tuple(said["events"])})


def main_thread_place(most: int = 2) -> str:
    """Where the main thread of this process stands: file, line and function of its innermost frame,
    and of the `most` innermost ones outside of libraries that lead to it.
    """
    # Lines, not frames: a frame keeps alive what its function has, and itself if it is this one.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    callers = 0
    while frame is not None and callers < most:
        is_caller = not _is_of_library(frame.f_code.co_filename)
        if is_caller or not lines:
            lines.append(_line(frame))
        callers += is_caller
        frame = frame.f_back
    return ", called at ".join(lines) or "its end"


def _is_of_library(file: str) -> bool:
    """Whether it is ours, torch's or Python's own: nobody looks for the cause there first."""
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith((*_LIBRARIES, "<frozen")) or (file.startswith(_STDLIB) and not installed)


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    place = f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    return place[-_SAID_CHARS:]


@functools.cache
def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def seen_of(last: Account) -> str:
    """What has become of the process that said `last`, if that can be seen from here; goes on
    "rank 1 ...". Empty if not, or if it may answer.
    """
    state = _process_state(last.pid) if last.host == _host() else ""
    became = _ENDINGS.get(state, "")
    return f"{became} ({_process(last)})" if became else ""


def why_silent(last: Account | None, waited_s: float) -> str:
    """Why a rank did not answer of which `last` was heard, as far as it can be seen from here."""
    if last is None:
        return f"never answered, nor within {waited_s:.1f} s: stopped, gone or out of reach"
    return seen_of(last) or (
        f"did not answer within {waited_s:.1f} s: busy, stopped, gone or without Python's lock "
        f"({_process(last)})"
    )


def _process(account: Account) -> str:
    return f"process {account.pid} on {account.host.split()[0]}"


def _process_state(pid: int) -> str:
    """The letter of `_ENDINGS` or another one."""
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        # Behind the name, which may have brackets and spaces in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def ago(what: str, at_s: float) -> str:
    """What happened `at_s` (`time.monotonic`), and how long ago."""
    return f"{what} {time.monotonic() - at_s:.1f} s ago"
