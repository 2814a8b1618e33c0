"""The ranks of a bench: processes of this machine that meet, work, and answer with what they found.

    device_type    backend    each rank has
    cpu            gloo       one compute thread; ranks talk over the loopback interface
    cuda           nccl       the GPU of its number, as the current device

A rank that fails ends the others; its traceback is in the error. Ranks end with the process that
started them, however it ends. They meet through a file, so no port has to be free.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..training.errors import UsageError
from ..training.launch.processes import Process, answer, answers, end, has_answered, wait_for, watch

GLOO_RANKS = 2
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOOPBACK = "lo"
_FAREWELL_S = 5.0
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class RanksFailed(RuntimeError):
    """A rank raised, ended early or overran; the text has the traceback of each that did."""


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
    enter: Callable[[int], None] | None = None,
    timeout_s: float = 1800.0,
    stop: threading.Event | None = None,
) -> list[Any]:
    """`work(rank, argument)` in `world` new processes; what each returned, in rank order.

    `work` must be importable and everything it takes or returns must pickle. `enter(rank)` is what
    a rank does first of all, such as to move into a network of its own. Raises RanksFailed
    with the traceback of the first rank that failed, or when a rank ended or `timeout_s` passed
    without a result, or another thread has set `stop`; no process is left behind.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}; ask for one rank or more.")
    stop = stop or threading.Event()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sidestream-bench-") as name:
        folder = Path(name)
        given = (work, argument, world, device_type)
        ranks = [
            context.Process(
                target=answer,
                args=(folder, rank, partial(_in_group, folder, rank, *given, enter=enter)),
                daemon=True,
            )
            for rank in range(world)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait(folder, ranks, timeout_s, stop)
            values, failures = answers(folder, ranks)
        finally:
            end(ranks)
    if stop.is_set():
        raise RanksFailed("the ranks were ended before they gave a result, as was asked for.")
    if failures:
        raise RanksFailed(
            "\n".join(f"rank {rank} failed:\n{text}" for rank, text in sorted(failures.items()))
        )
    if missing := sorted(set(range(world)) - set(values)):
        raise RanksFailed(
            f"ranks {missing} gave no result within {timeout_s:g} s; ask for fewer steps or a "
            "longer time limit."
        )
    return [values[rank] for rank in range(world)]


def _wait(folder: Path, ranks: Sequence[Process], timeout_s: float, stop: threading.Event) -> None:
    """Until all have answered or one has ended without, and then a little longer; or `stop`."""
    for running in watch(ranks, timeout_s):
        if stop.is_set():
            return
        has = {rank: has_answered(folder, number) for number, rank in enumerate(ranks)}
        if all(has.values()) or any(rank not in running and not has[rank] for rank in ranks):
            # The rank that is to blame may speak last.
            wait_for(running, _FAREWELL_S)
            return


def _in_group(
    folder: Path,
    rank: int,
    work: Callable[[int, Any], Any],
    argument: Any,
    world: int,
    device_type: str,
    *,
    enter: Callable[[int], None] | None,
) -> Any:
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    if enter is not None:
        enter(rank)
    os.environ.update(_ENVIRONMENT)
    if Path("/sys/class/net", _LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    torch.set_num_threads(1)
    # DTensor calls a collective by a name that torch itself has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    device = device_of(rank, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type],
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
        device_id=device if device.type == "cuda" else None,
    )
    value = work(rank, argument)
    dist.barrier()
    dist.destroy_process_group()
    return value


def _end_with_parent() -> None:
    """Killed, it would leave its ranks to work on for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started by run_ranks"
    parent.join()
    os._exit(1)


def read_loopback_bytes() -> int | None:
    """Bytes the loopback interface has carried so far, or None where the system does not tell."""
    statistics = Path("/sys/class/net", _LOOPBACK, "statistics", "tx_bytes")
    return int(statistics.read_text()) if statistics.exists() else None
