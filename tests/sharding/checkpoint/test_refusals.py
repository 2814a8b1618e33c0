"""Checkpoints that cannot be saved or loaded: refused on every rank, before anything is changed."""

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Transformer

pytestmark = pytest.mark.timeout(120)


class WithNote(nn.Linear):
    """Has extra state, which can be anything."""

    note: object = "fine"

    def get_extra_state(self) -> object:
        return {"deep": [self.note]}

    def set_extra_state(self, state: object) -> None:
        pass


class Refuses:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


def make(steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Transformer(num_blocks=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ss.fully_shard(model, optimizer)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.zeros(2, 3, dtype=torch.int64)).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {
        f"{place} {key}": value.clone()
        for place, entries in enumerate(optimizer.state.values())
        for key, value in entries.items()
    }
    return ss.full_state_dict(model) | state


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


PATHS: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, "path: expected text or a pathlib.Path, got NoneType"),
    "number": (3, TypeError, "got int"),
    "bytes": (b"c", TypeError, "got bytes"),
    "empty": ("", ValueError, "path: expected a folder with a name, got ''"),
    "root": ("/", ValueError, "path: expected a folder with a name, got '/'"),
    "zero byte": ("a\0b", ValueError, r"path: expected the path of a folder, got 'a\\x00b'"),
}


@pytest.mark.parametrize("call", [ss.save_checkpoint, ss.load_checkpoint], ids=["save", "load"])
@pytest.mark.parametrize("case", PATHS.values(), ids=PATHS)
def test_paths(call: Callable[..., Any], case: tuple[Any, type[Exception], str]) -> None:
    path, kind, message = case
    with pytest.raises(kind, match=message):
        call(path, nn.Linear(2, 2))


@pytest.mark.parametrize("name", [".c.partial", ".c.replaced"])
def test_names_that_saving_beside_them_would_remove(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a name that is not made from another"):
        ss.save_checkpoint(tmp_path / name, nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())


EXTRAS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "function": (lambda model: {"step": lambda: 1}, "cannot be saved .*local object"),
    "lock": (lambda model: [threading.Lock()], "cannot be saved .*lock"),
    "raises": (lambda model: Refuses(), r"cannot be saved \(not me\)"),
    "deep": (lambda model: nested(100_000), "cannot be saved .*recursion"),
    "path": (lambda model: Path("c"), "got pathlib.*Path, which only unsafe unpickling"),
    "module": (lambda model: model.head, "Linear, which only unsafe"),
    "sharded": (lambda model: {"w": model.head.weight}, "'head.weight'.*full_state_dict"),
}


@pytest.mark.parametrize("case", EXTRAS.values(), ids=EXTRAS)
def test_extra_that_could_not_be_read_back(
    case: tuple[Callable[[nn.Module], Any], str], tmp_path: Path
) -> None:
    extra, message = case
    model = Transformer(num_blocks=1)
    if "head.weight" in message:
        ss.fully_shard(model)
    ss.save_checkpoint(tmp_path / "c", model, extra="old")
    with (
        mock.patch.object(dcp, "save", side_effect=AssertionError("began to write")),
        pytest.raises(TypeError, match=f"^extra: expected numbers, strings, tensors .*{message}"),
    ):
        ss.save_checkpoint(tmp_path / "c", model, extra=extra(model))
    assert os.listdir(tmp_path) == ["c"]
    assert ss.load_checkpoint(tmp_path / "c", model) == "old"


@pytest.mark.parametrize(
    "place", ["model._extra_state.deep.0", "optim.param_groups.0.note", "optim.state.weight.note"]
)
def test_other_state_that_could_not_be_read_back(place: str, tmp_path: Path) -> None:
    model = WithNote(2, 2)
    _, optimizer = ss.fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer is not None
    if place.startswith("model"):
        model.note = Path("here")
    elif "group" in place:
        optimizer.param_groups[0]["note"] = Path("here")
    else:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["note"] = Path("here")
    with pytest.raises(TypeError, match=rf"^{place}: expected numbers.*got pathlib"):
        ss.save_checkpoint(tmp_path / "c", model, optimizer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [ss.save_checkpoint, ss.load_checkpoint], ids=["save", "load"])
def test_what_is_no_module_or_optimizer(call: Callable[..., Any], tmp_path: Path) -> None:
    model, optimizer = make()
    ss.save_checkpoint(tmp_path / "c", model, optimizer)
    with pytest.raises(TypeError, match=r"^module: expected a torch.nn.Module, got AdamW"):
        call(tmp_path / "c", optimizer, model)
    with pytest.raises(TypeError, match=r"^optimizer: .*got dict; .*goes to save_checkpoint's ext"):
        call(tmp_path / "c", model, {"step": 3})


def test_checkpoints_without_checksums_load(tmp_path: Path) -> None:
    model, optimizer = make()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        ss.save_checkpoint(tmp_path / "c", model, optimizer, extra=3)
    finally:
        torch.serialization.set_crc32_options(before)
    other, other_optimizer = make()
    assert ss.load_checkpoint(tmp_path / "c", other, other_optimizer) == 3
    assert same(everything(model, optimizer), everything(other, other_optimizer))


def misuse(rank: int, world_size: int, folder: str) -> list[str]:
    """What this rank is told where the ranks do not agree; the first word is the attempt's name."""
    model, optimizer = make()
    for name in ("a", "b"):
        ss.save_checkpoint(f"{folder}/{name}", model, optimizer, extra=rank)
        train(model, optimizer, 1)
    if rank == 0:
        shutil.copytree(f"{folder}/b", f"{folder}/damaged")
        data = Path(folder, "damaged", "__1_0.distcp")
        stored = data.read_bytes()  # of rank 1's parts, which rank 0 does not read
        data.write_bytes(stored[:-2000] + bytes(100) + stored[-1900:])
        os.mkdir(f"{folder}/elsewhere")

    def one(zeroth: Any, first: Any) -> Any:
        return first if rank else zeroth

    attempts: dict[str, Callable[[], Any]] = {
        "names": lambda: ss.save_checkpoint(f"{folder}/{one('x', 'y')}", model, optimizer),
        "folders": lambda: ss.save_checkpoint(
            f"{folder}/{one('a', 'elsewhere/a')}", model, optimizer
        ),
        "no-path": lambda: ss.save_checkpoint(one(f"{folder}/a", None), model, optimizer),
        "no-module": lambda: ss.save_checkpoint(f"{folder}/a", one(None, model), optimizer),
        "one-optimizer": lambda: ss.save_checkpoint(f"{folder}/a", model, one(optimizer, None)),
        "extra": lambda: ss.save_checkpoint(f"{folder}/a", model, extra=one(1, print)),
        "two-to-load": lambda: ss.load_checkpoint(f"{folder}/{one('a', 'b')}", model, optimizer),
        "damaged": lambda: ss.load_checkpoint(f"{folder}/damaged", model, optimizer),
        "one-to-load": lambda: ss.load_checkpoint(f"{folder}/a", model, one(None, optimizer)),
    }
    before = everything(model, optimizer)
    told = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - the test compares what it is
            told.append(f"{name} {type(error).__name__}: {error}")
        assert same(everything(model, optimizer), before), name
    assert ss.load_checkpoint(f"{folder}/a", model, optimizer) == rank
    return told


MISUSE = [
    "names ValueError: path: expected the same on every rank, got .*/x on rank 0 and .*/y on rank",
    "folders RuntimeError: rank 0: path: expected a folder that all ranks write to, got .*__1_0",
    "no-path TypeError: rank 1: path: expected text or a pathlib.Path, got NoneType",
    "no-module TypeError: rank 0: module: expected a torch.nn.Module, got NoneType",
    "one-optimizer ValueError: optimizer: expected the same on every rank, got one on rank 0 and n",
    "extra TypeError: rank 1: extra: expected numbers, .* got print, which only unsafe",
    "two-to-load ValueError: path: expected the same on every rank, got .*/a on rank 0 and .*/b on",
    "damaged ValueError: (rank 1: )?checkpoint .*/damaged: expected .* got .*damaged .*Nothing",
    "one-to-load ValueError: optimizer: expected the same on every rank, got none on rank 0 and o",
]


def test_ranks_that_do_not_agree_are_all_told(tmp_path: Path) -> None:
    both = run_on_ranks(misuse, 2, str(tmp_path), timeout_s=90)
    for zero, one, expected in zip(*both, MISUSE, strict=True):
        # The rank whose own error it is need not be told which rank it was.
        if not expected.startswith("damaged"):  # which each rank finds in its own way
            assert re.sub(r"rank \d: ", "", zero) == re.sub(r"rank \d: ", "", one)
        assert re.search(f"^{expected}", max(zero, one, key=len)), (zero, one)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "damaged", "elsewhere"]
    assert not os.listdir(tmp_path / "elsewhere"), "a rank left its part of a failed save"
