"""Runs a function on several ranks, one process each, and brings back their values or failures.

    from sidestream.tests.ranks import run_on_ranks

    def _sum(rank, world_size, factor): ...          # at the top level of the test file
    values = run_on_ranks(_sum, 2, 3.0)              # [value of rank 0, value of rank 1]

The processes come from a fork server that has torch and sidestream loaded already: about 3 s for
the first call of a session, 0.1 to 0.2 s for each one after it. Calls, results and failures travel
as files in a temporary folder, so there are no ports, no pipes that fill up and no shared memory.
"""

import datetime
import faulthandler
import gc
import importlib
import importlib.util
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..training.launch import processes
from . import poison

# `torch._dynamo` is what making an optimizer imports: more than a second of each rank's time. And
# `torch.distributed.checkpoint` is what saving imports.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.checkpoint", "torch.optim"]
PRELOAD += ["torch._dynamo", "numpy", "pytest", "sidestream", __name__]
STACK_DUMP_S = 0.5
# Of the time limit: a collective that hangs then raises in its own rank, which says where.
GROUP_SHARE = 0.8


def preload(*modules: str) -> None:
    """Have the fork server load `modules` too, so that ranks do not each do so; missing ones are
    passed over. A test file calls it where it is imported, before the first test runs.
    """
    PRELOAD.extend(name for name in modules if name not in PRELOAD)


class RanksFailed(Exception):
    """Ranks raised, died or overran; `failures` has their texts, `values` what others returned."""

    def __init__(self, failures: Mapping[int, str], values: Mapping[int, Any]) -> None:
        self.failures = dict(failures)
        self.values = dict(values)
        texts = [f"--- rank {rank}: {text}" for rank, text in sorted(self.failures.items())]
        super().__init__(f"{len(texts)} ranks failed\n" + "\n".join(texts))


@dataclass(frozen=True)
class _Call:
    module: str
    path: str
    function: str
    world_size: int
    timeout_s: float
    backend: str | None
    env: dict[str, str]
    folder: str

    def file(self, kind: str, rank: int) -> Path:
        return Path(self.folder) / f"{kind}_{rank}"


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(rank, world_size, *args)` on `world_size` ranks; return values in rank order.

    `function` stands at the top level of its module; arguments and values are anything picklable,
    tensors included. Each rank has one thread, a default process group of `backend` (`None`: no
    group) on the loopback interface, and this process's environment updated with `env`. Raises
    `RanksFailed` with every rank's traceback, the signal that killed a rank, and the stacks of each
    rank that ran longer than `timeout_s` (those are killed).
    """
    _require_top_level(function)
    with tempfile.TemporaryDirectory(prefix="sidestream-ranks-") as folder:
        call = _Call(
            module=function.__module__,
            path=os.path.abspath(function.__code__.co_filename),
            function=function.__qualname__,
            world_size=world_size,
            timeout_s=timeout_s,
            backend=backend,
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(env or {})},
            folder=folder,
        )
        torch.save(args, Path(folder) / "args")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        # Without the folder that pytest runs in on its path: `kernels` is also a package of others.
        with mock.patch.dict(os.environ, PYTHONSAFEPATH="1"):
            forkserver.ensure_running()
        ranks = [
            context.Process(target=_rank_main, args=(call, rank)) for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            overdue = processes.wait_for(ranks, timeout_s)
            _dump_stacks(overdue)
        finally:
            processes.end(ranks)
        return _collect(call, ranks, overdue)


def _require_top_level(function: Callable[..., Any]) -> None:
    qualname = getattr(function, "__qualname__", repr(function))
    if not hasattr(function, "__code__") or not qualname.isidentifier():
        raise TypeError(
            f"run_on_ranks needs a plain function at the top level of its module, got {qualname}: "
            "the ranks load it by file and name, so closures, lambdas, methods and partials cannot "
            "travel; pass what it needs as arguments"
        )


def _dump_stacks(overdue: list[Any]) -> None:
    for rank in overdue:
        os.kill(rank.pid, signal.SIGUSR1)
    if overdue:
        time.sleep(STACK_DUMP_S)


def _collect(call: _Call, ranks: list[Any], overdue: list[Any]) -> list[Any]:
    values, failures = processes.answers(Path(call.folder), ranks)
    for rank in map(ranks.index, overdue):
        stack = processes.tail_of(call.file("stack", rank))
        failures[rank] = f"still running after {call.timeout_s:g} s, killed; it stood in\n{stack}"
    for rank in failures:
        if output := processes.tail_of(call.file("output", rank)):
            failures[rank] += f"\nits output ended with\n{output}"
    if failures:
        raise RanksFailed(failures, values)
    return [values[rank] for rank in range(call.world_size)]


def _rank_main(call: _Call, rank: int) -> None:
    _prepare_process(call, rank)
    processes.answer(Path(call.folder), rank, lambda: _value(call, rank))


def _value(call: _Call, rank: int) -> Any:
    function = _load_function(call)
    args = torch.load(Path(call.folder) / "args", weights_only=False)
    if call.backend is not None:
        _join_group(call, rank)
    value = function(rank, call.world_size, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _prepare_process(call: _Call, rank: int) -> None:
    # A collection that went over all that the fork server has loaded would copy its memory.
    gc.freeze()
    os.environ.clear()
    os.environ.update(call.env)
    output = os.open(call.file("output", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    stack = os.open(call.file("stack", rank), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    # Ends this rank even where the test process was killed before it could.
    signal.alarm(math.ceil(call.timeout_s) + 10)
    torch.set_num_threads(1)
    poison.install()


def _join_group(call: _Call, rank: int) -> None:
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.folder}/rendezvous",
        rank=rank,
        world_size=call.world_size,
        timeout=datetime.timedelta(seconds=max(1.0, GROUP_SHARE * call.timeout_s)),
    )
    # A rank that returned at once would close its connections while others still make theirs.
    dist.barrier()


def _load_function(call: _Call) -> Callable[..., Any]:
    module = sys.modules.get(call.module)
    if module is None and call.module.partition(".")[0] == "sidestream":
        module = importlib.import_module(call.module)
    if module is None:
        # Under pytest's importlib mode a test module has a name that no finder knows, so it is
        # loaded by its path, and registered with the modules above it under that name so that its
        # classes and functions pickle here and unpickle in the test process.
        spec = importlib.util.spec_from_file_location(call.module, call.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        parts = call.module.split(".")
        for count in range(1, len(parts)):
            parent = ".".join(parts[:count])
            sys.modules.setdefault(parent, types.ModuleType(parent))
        spec.loader.exec_module(module)
    return getattr(module, call.function)
