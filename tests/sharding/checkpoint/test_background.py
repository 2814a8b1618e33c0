"""Saves that a thread carries on while training goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sidestream as ss
from sidestream.sharding import communicators
from sidestream.sharding.checkpoint import background
from sidestream.tests.ranks import RanksFailed, run_on_ranks

pytestmark = pytest.mark.timeout(120)
WRITE = dcp.FileSystemWriter.write_data


class Model(nn.Module):
    """Has parameters, buffers, and state of its own that is stored as a pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.note = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note[0] += 1
        return self.body(x)

    def get_extra_state(self) -> object:
        return (self.note,)

    def set_extra_state(self, state: Any) -> None:
        self.note = state[0]


def make(
    zero: int | None = 3, mesh: DeviceMesh | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, plain without a ZeRO level, and its optimizer."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if zero is not None:
        ss.fully_shard(
            model,
            optimizer,
            device_mesh=mesh,
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=zero,
        )
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def writing_waits() -> Iterator[threading.Event]:
    """Until the event is set, or the block over, nothing is written."""
    may_write = threading.Event()

    def write_data(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(30)
        return WRITE(*args, **kwargs)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_data):
        try:
            yield may_write
        finally:
            may_write.set()


def data_of(folder: Path) -> dict[str, Any]:
    files = json.loads((folder / "sidestream.json").read_text())["checkpoint"]["digests"]
    return {name: digest for name, digest in files.items() if name != ".metadata"}


def saves_while_it_trains(rank: int, world_size: int, folder: str, levels: list[Any]) -> None:
    for zero in levels:
        model, optimizer = make(zero)
        bound = optimizer if zero is not None else None
        train(model, optimizer)
        extra = {"numbers": [rank], "tensor": torch.full((3,), float(rank))}
        at_once, later = Path(folder, f"{zero}-now"), Path(folder, f"{zero}-later")
        assert ss.save_checkpoint(at_once, model, bound, extra) is None
        with writing_waits() if rank == 0 else contextlib.nullcontext():
            future = ss.save_checkpoint(later, model, bound, extra, asynchronous=True)
            assert isinstance(future, Future)
            train(model, optimizer, steps=3)
            extra["numbers"].append(7)
            extra["tensor"].fill_(7)
            assert not later.exists() and not future.done() and not future.cancel()
        future.result()
        assert data_of(later) == data_of(at_once)
        fresh, fresh_optimizer = make(zero)
        bound = fresh_optimizer if zero is not None else None
        loaded = ss.load_checkpoint(later, fresh, bound)
        assert loaded["numbers"] == [rank] and loaded["tensor"].tolist() == [float(rank)] * 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_meanwhile_changes_nothing_of_what_is_written(
    world_size: int, tmp_path: Path
) -> None:
    run_on_ranks(saves_while_it_trains, world_size, str(tmp_path), [0, 1, 2, 3, None])


def test_without_a_process_group_too(tmp_path: Path) -> None:
    saves_while_it_trains(0, 1, str(tmp_path), [3, None])


def saves_stages(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model, optimizer = make(mesh=mesh["dp"])
    stage = mesh.get_local_rank("pp")
    for extra in range(3):
        if stage == 0 or extra:  # the stages have not saved equally often
            path = Path(folder, f"stage{stage}")
            future = ss.save_checkpoint(path, model, optimizer, extra, asynchronous=True)
            train(model, optimizer)
    future.result()
    assert ss.load_checkpoint(path, model, optimizer) == 2
    # A model on all ranks, after groups that only some of them made.
    everywhere, its_optimizer = make()
    everything = Path(folder, "everywhere")
    ss.save_checkpoint(everything, everywhere, its_optimizer, asynchronous=True).result()


def test_stages_save_at_the_same_time(tmp_path: Path) -> None:
    run_on_ranks(saves_stages, 4, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["everywhere", "stage0", "stage1"]


def saves_and_goes_on(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make()
    one, other = Path(folder, "one"), Path(folder, "other")
    for asynchronous in (True, False):
        for path in (one, other):
            with writing_waits() as may_write:
                first = ss.save_checkpoint(one, model, optimizer, "first", asynchronous=True)
                threading.Timer(0.2, may_write.set).start()
                second = ss.save_checkpoint(
                    path, model, optimizer, "second", asynchronous=asynchronous
                )
                assert first.done()
            assert ss.load_checkpoint(path, model, optimizer) == "second"
            assert second is None or (second.done() and second.result() is None)
    with writing_waits() as may_write:
        ss.save_checkpoint(one, model, optimizer, "third", asynchronous=True)
        threading.Timer(0.2, may_write.set).start()
        assert ss.load_checkpoint(one, model, optimizer) == "third"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_save_and_a_load_wait(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(saves_and_goes_on, world_size, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


def full(*_: Any, **__: Any) -> None:
    raise OSError("no space")


def fails(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make()
    path = Path(folder, "c")
    ss.save_checkpoint(path, model, optimizer, "old")

    def save() -> Future[None]:
        writer = mock.patch.object(dcp.FileSystemWriter, "write_data", full)
        with writer if rank == world_size - 1 else contextlib.nullcontext():
            future = ss.save_checkpoint(path, model, optimizer, "new", asynchronous=True)
            wait([future])  # the patch holds for the thread as well
        return future

    message = rf"writing {path} failed on rank {world_size - 1}: no space"
    for _ in range(2):
        future = save()
        with pytest.raises(OSError, match=message):
            future.result()
        assert isinstance(future.exception(), OSError)
    # That was asked for; this is not, on the last rank.
    future = save()
    assert rank == world_size - 1 or future.exception() is not None
    with pytest.raises(RuntimeError, match=rf"asynchronous save of {path}, before this.*{message}"):
        ss.save_checkpoint(path, model, optimizer, "lost")
    assert ss.load_checkpoint(path, model, optimizer) == "old"
    ss.save_checkpoint(path, model, optimizer, "newest")
    assert ss.load_checkpoint(path, model, optimizer) == "newest"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_failure_is_told_on_every_rank_and_never_lost(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(fails, world_size, str(tmp_path))
    assert os.listdir(tmp_path) == ["c"]


def is_refused(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = make()
    Path(folder, "mine").mkdir(exist_ok=True)
    Path(folder, "mine", "file").touch()
    cases: list[tuple[str, Any, Any, type[Exception], str]] = [
        ("mine", None, True, FileExistsError, "got other files"),
        ("c", threading.Lock() if rank == 1 else 0, True, TypeError, "extra: expected numbers"),
        ("c", None, bool(rank), ValueError, "asynchronous: expected the same on every rank"),
        ("c", None, "yes", TypeError, "asynchronous: expected True or False, got 'yes'"),
    ]
    for name, extra, asynchronous, kind, message in cases:
        with pytest.raises(kind, match=message):
            ss.save_checkpoint(
                Path(folder, name), model, optimizer, extra, asynchronous=asynchronous
            )
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("save") for name in names), "nothing is being written"


def test_what_can_be_refused_is_refused_at_once_on_every_rank(tmp_path: Path) -> None:
    run_on_ranks(is_refused, 2, str(tmp_path))
    assert os.listdir(tmp_path) == ["mine"]


def dies_while_writing(rank: int, world_size: int, folder: str) -> str:
    model, optimizer = make()
    path = Path(folder, "c")
    ss.save_checkpoint(path, model, optimizer, "old")

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", die if rank == 2 else WRITE):
        future = ss.save_checkpoint(path, model, optimizer, "new", asynchronous=True)
        error = future.exception(timeout=30)
    return f"{type(error).__name__}: {error}"


def test_a_rank_that_dies_is_told_and_nothing_is_published(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL") as caught:
        run_on_ranks(dies_while_writing, 3, str(tmp_path))
    assert list(caught.value.failures) == [2]
    for message in caught.value.values.values():
        assert message.startswith("CommunicationError") and "has probably died" in message
    assert os.listdir(tmp_path) == ["c"]
    assert ss.load_checkpoint(tmp_path / "c", make(None)[0]) == "old"


def destroys_the_group(rank: int, world_size: int, folder: str) -> str:
    model, optimizer = make()
    with writing_waits():
        future = ss.save_checkpoint(Path(folder, "c"), model, optimizer, asynchronous=True)
        dist.destroy_process_group()
    with pytest.raises(RuntimeError) as caught:
        future.result()
    return str(caught.value)


def test_a_group_that_is_destroyed_meanwhile_is_a_clear_error(tmp_path: Path) -> None:
    for message in run_on_ranks(destroys_the_group, 2, str(tmp_path)):
        assert "call result() of the future that save_checkpoint returned before destroy" in message
    assert not os.listdir(tmp_path)


EXITS = """
import sys, time
from unittest import mock
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
import sidestream as ss
from sidestream.tests.sharding.checkpoint.test_background import WRITE, full, make

rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world_size > 1:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)

def late(*args):
    time.sleep(0.5)
    return WRITE(*args) if world_size > 1 else full()

dcp.FileSystemWriter.write_data = late
ss.save_checkpoint(f"{folder}/c", *make(), asynchronous=True)
print("the end")
"""


def outputs_of_programs(world_size: int, folder: Path) -> list[str]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, str(rank), str(world_size), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world_size)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, outputs
    return outputs


def test_the_end_of_the_program_waits_until_all_is_published(tmp_path: Path) -> None:
    assert outputs_of_programs(2, tmp_path) == ["the end\n", "the end\n"]
    assert (tmp_path / "c" / "sidestream.json").exists()


def test_the_end_of_the_program_tells_of_a_failure_that_nobody_asked_for(tmp_path: Path) -> None:
    (output,) = outputs_of_programs(1, tmp_path)
    assert f"the asynchronous save of {tmp_path / 'c'} failed, and nobody asked: writing" in output


class EndsMeanwhile(threading.Condition):
    """That of a save which fails once somebody has stopped waiting for it."""

    def __init__(self, saving: Future[None]) -> None:
        super().__init__()
        self._saving: list[Future[None]] = [saving]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._saving:
            self._saving.pop().set_exception(OSError("no space"))


def test_who_stopped_waiting_just_before_the_failure_has_not_asked() -> None:
    saving = background._Saving("here")
    saving._condition = EndsMeanwhile(saving)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        saving.result(0.0)
    assert isinstance(saving.lost_error(), OSError)
    assert saving.lost_error() is None


def starts_anew(rank: int, world_size: int, folder: str) -> None:
    """What the end of the program does where a model keeps the group of an earlier job alive."""
    old = dist.group.WORLD
    assert old is not None
    communicators.background_group(old, torch.device("cpu"))
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    latest = communicators.background_group(dist.group.WORLD, torch.device("cpu"))
    communicators._end_background_groups()
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(latest)


def test_groups_of_an_earlier_job_do_not_disturb_the_end_of_the_program(tmp_path: Path) -> None:
    run_on_ranks(starts_anew, 2, str(tmp_path), timeout_s=30)
