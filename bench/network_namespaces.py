"""Makes the network of a plan, lets ranks into it and removes it, whatever happens in between.

What was made is removed when the block ends, by an error or a signal too, and no second signal cuts
that short; what a run that was killed left is removed before the next network is made.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..training.errors import UsageError
from ..training.launch.interruption import noting_signals
from .network_plan import INTERFACE, Command, NetworkPlan, Owner, left_behind, removal

_FOLDER = Path("/var/run/netns")  # of iproute2, where each namespace has a file to enter it by
_COMMAND_S = 20.0
_PROGRAMS = ("ip", "tc")
# Bits of the capabilities that a container's root may lack, from linux/capability.h.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START_FIELD = 19  # of /proc/<pid>/stat, behind the name of the program


class NetworkFailed(RuntimeError):
    """A command that makes a network failed; the text says which, and what it said."""


def require_network() -> None:
    """Refuse where no namespaces can be made.

    Raises:
        UsageError: no Linux, no root or not all of its rights, or iproute2 is missing.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"bench network: expected Linux with network namespaces, got {sys.platform}; run it "
            "in a Linux machine, a virtual one will do"
        )
    if os.geteuid() != 0:
        raise UsageError(
            f"bench network: expected root, which may make network namespaces, got user "
            f"{os.geteuid()}; run it with sudo"
        )
    if missing := missing_capabilities(Path("/proc/self/status").read_text()):
        raise UsageError(
            f"bench network: expected root's full rights, got none of {', '.join(missing)}; run it "
            "outside the container, or start that with --privileged"
        )
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise UsageError(
            f"bench network: expected the programs {' and '.join(_PROGRAMS)} in PATH, got no "
            f"{' and no '.join(missing)}; install iproute2, such as by apt-get install iproute2"
        )


def missing_capabilities(status: str) -> list[str]:
    """Which of those that it takes a process lacks; `status`: its /proc/<pid>/status."""
    (effective,) = [int(line.split()[1], 16) for line in status.splitlines() if "CapEff:" in line]
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def this_process() -> Owner:
    """Who makes networks here."""
    pid = os.getpid()
    start_ticks = _start_ticks(pid)
    assert start_ticks is not None
    return Owner(pid, start_ticks)


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name is in brackets, and may have some of its own.
    return int(text.rpartition(")")[2].split()[_START_FIELD])


@contextmanager
def network(plan: NetworkPlan) -> Iterator[None]:
    """Have the network of `plan` inside the block; leftovers of ended runs go first.

    What cannot be removed is said on the error output. Raises NetworkFailed when it cannot be made,
    and `Interrupted` when a signal came while it was removed, once that is done.
    """
    remove(left_behind(existing(), lambda owner: _start_ticks(owner.pid) == owner.start_ticks))
    try:
        for command in plan.make:
            if fault := _fault(command):
                raise NetworkFailed(f"{' '.join(command)}: {fault}")
        yield
    finally:
        with noting_signals() as late:
            remove(plan.namespaces)
        late.raise_noted()


def existing() -> list[str]:
    """The names of all network namespaces that have one."""
    return sorted(path.name for path in _FOLDER.iterdir()) if _FOLDER.is_dir() else []


def remove(namespaces: Sequence[str]) -> None:
    """Remove those that exist, the last first; say which still do, and what to do about it."""
    made = set(existing())
    faults = {
        name: fault
        for name in reversed(namespaces)
        if name in made and (fault := _fault(removal(name)))
    }
    for name in sorted(set(existing()) & set(namespaces)):
        print(
            f"sidestream: could not remove the network namespace {name}: "
            f"{faults.get(name, 'it is still there')}; run: {' '.join(removal(name))}",
            file=sys.stderr,
            flush=True,
        )


def _fault(command: Command) -> str:
    """Run it; what went wrong, or nothing."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            # A Ctrl-C in the terminal is ours to answer: it must not end half of a removal.
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def enter(namespaces: Sequence[str], rank: int) -> None:
    """Move this process, a rank that has one thread and no sockets yet, into its namespace, where
    gloo then listens and connects. It ends when the process that started it does.

    Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / namespaces[rank]).open() as opened:
        # os.setns came with Python 3.12.
        if libc.setns(opened.fileno(), _CLONE_NEWNET) or libc.prctl(
            _PR_SET_PDEATHSIG, int(signal.SIGKILL)
        ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def read_sent_bytes() -> int:
    """Bytes that this process's namespace has sent through its interface, headers included.

    /sys shows the namespace that mounted it, so /proc is asked.
    """
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines())
    sent_bytes = {words[0]: words[9] for words in lines if words[0].endswith(":")}
    assert f"{INTERFACE}:" in sent_bytes, "only who has entered a namespace of the network asks"
    return int(sent_bytes[f"{INTERFACE}:"])
