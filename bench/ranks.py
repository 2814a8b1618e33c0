"""Owns the rank processes of a bench: start them on this machine, join them, collect what each
returns.

    device_type    backend    each rank has
    cpu            gloo       one compute thread; ranks talk over the loopback interface
    cuda           nccl       the GPU of its number, as the current device

A rank that fails ends the others; its traceback is in the error. Ranks meet through a file, so no
port has to be free.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..training.errors import UsageError

GLOO_RANKS = 2
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOOPBACK = "lo"
_FAREWELL_S = 5.0
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class RanksFailed(RuntimeError):
    """A rank raised, ended early or overran; the text has the traceback of each that did."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where the ranks meet and on what they compute."""

    rendezvous: str
    device_type: str


def device_of(rank: int, device_type: str) -> torch.device:
    """What rank `rank` computes on."""
    return torch.device("cuda", rank) if device_type == "cuda" else torch.device(device_type)


def choose_ranks(device: str, world: int | None) -> tuple[str, int]:
    """The type of device and the number of ranks.

    Raises:
        UsageError: there is no GPU though one was asked for, or fewer than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise UsageError(
            "--device: expected a GPU that torch sees, got none; leave --device out, or pass cpu"
        )
    if device == "cpu" or not gpus:
        return "cpu", world or GLOO_RANKS
    if world is not None and world > gpus:
        raise UsageError(
            f"--world: expected at most {gpus}, a GPU for each rank, got {world}; ask for fewer, "
            "or pass --device cpu"
        )
    return "cuda", world or gpus


def run_ranks(
    work: Callable[[int, Any], Any],
    world: int,
    argument: Any,
    *,
    device_type: str = "cpu",
    timeout_s: float = 1800.0,
) -> list[Any]:
    """`work(rank, argument)` in `world` new processes; what each returned, in rank order.

    `work` must be importable and everything it takes or returns must pickle. Raises RanksFailed
    with the traceback of the first rank that failed, or when a rank ended or `timeout_s` passed
    without a result; no process is left behind.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}; ask for one rank or more.")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        processes: list[BaseProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_enter,
                    args=(work, rank, world, _Meeting(rendezvous, device_type), argument, sender),
                    daemon=True,
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            results = _collect(receivers, timeout_s)
            for started in processes:
                started.join(timeout=_FAREWELL_S)
            return results
        finally:
            for started in processes:
                started.kill()
                started.join()
            for receiver in receivers:
                receiver.close()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(receivers):
        waiting = {
            receiver: rank
            for rank, receiver in enumerate(receivers)
            if rank not in results and rank not in failures
        }
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver, rank in waiting.items():
            if receiver in ready:
                succeeded, value = _receive(receiver)
                (results if succeeded else failures)[rank] = value
        if failures:
            # The rank that is to blame may speak last: give the others time to say why they failed.
            deadline = min(deadline, time.monotonic() + _FAREWELL_S)
    if failures:
        raise RanksFailed(
            "\n".join(f"rank {rank} failed:\n{text}" for rank, text in sorted(failures.items()))
        )
    missing = sorted(set(range(len(receivers))) - set(results))
    if missing:
        raise RanksFailed(
            f"ranks {missing} gave no result within {timeout_s:g} s; "
            "ask for fewer steps or a longer time limit."
        )
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection) -> tuple[bool, Any]:
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        return False, "it ended without a result or an error."
    return succeeded, value


def _enter(
    work: Callable[[int, Any], Any],
    rank: int,
    world: int,
    meeting: _Meeting,
    argument: Any,
    sender: Connection,
) -> None:
    os.environ.update(_ENVIRONMENT)
    if Path("/sys/class/net", _LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    torch.set_num_threads(1)
    # DTensor calls a collective by a name that torch itself has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        device = device_of(rank, meeting.device_type)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            _BACKENDS[device.type],
            init_method=meeting.rendezvous,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=300),
            device_id=device if device.type == "cuda" else None,
        )
        outcome = (True, work(rank, argument))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - whatever it is, the parent raises it with its traceback
        outcome = (False, traceback.format_exc())
    sender.send(outcome)
    sender.close()


def read_loopback_bytes() -> int | None:
    """Bytes the loopback interface has carried so far, or None where the system does not tell."""
    statistics = Path("/sys/class/net", _LOOPBACK, "statistics", "tx_bytes")
    return int(statistics.read_text()) if statistics.exists() else None
