"""Tests of saving and loading: bit-exact resumption, all or nothing, and what is refused first."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

import sidestream
from sidestream.sharding.checkpoint import folder as checkpoint_folder
from sidestream.sharding.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import named_state
from sidestream.sharding.tensor.sharded_tensor import ShardedTensor
from sidestream.tests.ranks import RanksFailed, run_on_ranks

pytestmark = pytest.mark.timeout(120)


class _Tied(nn.Module):
    """Tied weights, buffers of two dtypes, extra state, a scalar and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 6)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight
        self.first.bias.requires_grad_(False)
        self.calls: dict[str, Any] = {"count": 0, "history": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["count"] += 1
        return self.head(self.second(self.norm(self.first(self.embed(x)))) * self.gain)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.calls["count"], "seen": torch.tensor([self.calls["count"]])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls["count"] = state["count"] + 0 * int(state["seen"])


def _make(seed: int, zero: int = 3, lr: float = 0.01) -> tuple[_Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Tied()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": lr / 2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9))
    sidestream.fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
    return model, optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        x = (torch.arange(12) * (rank + 1) + step) % 8
        nn.functional.cross_entropy(model(x), (x * step + 1) % 8).backward()
        optimizer.step()
        optimizer.zero_grad()


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whole parameters, buffers, state and options by name."""
    named = named_state(names_of_params(model), optimizer)
    flat = dict(full_state_dict(model))
    for name, entries in named["state"].items():
        for entry, value in entries.items():
            whole = value.full_tensor() if isinstance(value, ShardedTensor) else value
            flat[f"state of {name}: {entry}"] = whole
    for number, group in enumerate(named["param_groups"]):
        flat |= {f"group {number}: {option}": value for option, value in group.items()}
    return flat


def _differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    different = sorted(expected.keys() ^ got.keys())
    for key in expected.keys() & got.keys():
        a, b = expected[key], got[key]
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        if not same:
            different.append(f"{key}: expected {a}, got {b}")
    return different


def _train_and_save(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(3), rank)
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.param_groups[1]["initial_lr"] = 7.0
    extra = {"rank": rank, "noise": torch.full((3,), float(rank)), "nested": [1, (2.5, None, True)]}
    save_checkpoint(folder, model, optimizer, extra=extra)
    return _everything(model, optimizer)


def _load(rank: int, world_size: int, folder: str, zero: int, expected: Any) -> list[str]:
    """What was not restored."""
    model, optimizer = _make(seed=1, zero=zero, lr=0.9)
    if rank % 2:
        model.norm.running_mean.fill_(3.0)
    extra = load_checkpoint(folder, model, optimizer)
    wrong = _differences(expected, _everything(model, optimizer))
    if model.head.weight is not model.embed.weight:
        wrong.append("the tie")
    saved_by = rank if world_size == 2 else 0
    noise = torch.full((3,), float(saved_by))
    if extra["rank"] != saved_by or not torch.equal(extra["noise"], noise):
        wrong.append(f"extra {extra}")
    if extra["nested"] != [1, (2.5, None, True)] or model.calls["count"] != 3:
        wrong.append(f"{extra} or {model.calls}")
    model(torch.arange(8))  # gathers again: the loaded values are the ones computed with
    return wrong


def _resume(rank: int, world_size: int, folder: str) -> list[str]:
    """What a resumed run has other than one without interruption."""
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(3), rank)
    save_checkpoint(folder, model, optimizer)
    _train(model, optimizer, range(3, 6), rank)
    resumed, resumed_optimizer = _make(seed=1)
    _train(resumed, resumed_optimizer, range(1), rank)
    load_checkpoint(folder, resumed, resumed_optimizer)
    _train(resumed, resumed_optimizer, range(3, 6), rank)
    runs = [_everything(model, optimizer), _everything(resumed, resumed_optimizer)]
    if rank > 0:  # running statistics are each rank's own, and rank 0's are saved
        runs = [{k: v for k, v in run.items() if not k.startswith("norm.running")} for run in runs]
    return _differences(*runs)


def test_every_world_size_and_zero_level_restores_everything_bit_for_bit(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = run_on_ranks(_train_and_save, 2, folder, timeout_s=60)[0]
    assert torch.equal(expected["embed.weight"], expected["head.weight"])
    for world_size, zero in [(1, 3), (2, 0), (3, 2), (4, 3)]:
        wrong = run_on_ranks(_load, world_size, folder, zero, expected, timeout_s=60)
        assert wrong == [[]] * world_size, (world_size, zero)


def test_a_resumed_run_ends_bit_equal_to_an_uninterrupted_one(tmp_path: Path) -> None:
    assert run_on_ranks(_resume, 2, str(tmp_path / "c"), timeout_s=60) == [[], []]


def test_without_a_process_group_and_without_an_optimizer(tmp_path: Path) -> None:
    plain, (sharded, _) = _Tied(), _make(seed=1)
    save_checkpoint(tmp_path / "c", plain)
    assert load_checkpoint(tmp_path / "c", sharded) is None
    whole = full_state_dict(sharded)
    assert _differences(full_state_dict(plain), whole) == []
    assert whole["embed.weight"] is whole["head.weight"] and type(whole["gain"]) is Tensor
    whole["gain"].zero_()
    assert _differences(full_state_dict(plain), full_state_dict(sharded)) == []


class _Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.third = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def _sharded_other(kind: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _Other()
    optimizer_class = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    sidestream.fully_shard(model, optimizer)
    return model, optimizer


def test_another_model_is_refused_with_every_difference_and_nothing_changes(tmp_path: Path) -> None:
    saved, optimizer = _make(seed=0)
    _train(saved, optimizer, range(1), 0)
    save_checkpoint(tmp_path / "c", saved, optimizer)
    model, optimizer = _sharded_other()
    before = _everything(model, optimizer)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        load_checkpoint(tmp_path / "c", model, optimizer)
    text = str(error.value)
    assert "missing: model.third.weight" in text
    assert "shape of model.first.weight: expected (4, 6), got (5, 6)" in text
    assert "shape of model.first.bias: expected (4,), got (5,)" in text
    for name in ("model.gain", "model.norm.running_var", "model._extra_state.seen"):
        assert name in text.split("unexpected: ")[1]
    for name in ("optim.state.gain.exp_avg", "optim.param_groups.1.lr"):
        assert name in text.split("unexpected: ")[1]
    assert _differences(before, _everything(model, optimizer)) == []


@pytest.mark.parametrize("stored", ["another optimizer", "no optimizer", "other groups"])
def test_another_optimizer_is_refused(tmp_path: Path, stored: str) -> None:
    saved, optimizer = _sharded_other("sgd" if stored == "another optimizer" else "adamw")
    save_checkpoint(tmp_path / "c", saved, None if stored == "no optimizer" else optimizer)
    model, optimizer = _sharded_other()
    if stored == "other groups":
        model = _Other()
        groups = [{"params": list(model.first.parameters())}, {"params": [model.third.weight]}]
        model, optimizer = sidestream.fully_shard(model, torch.optim.AdamW(groups))
    expected = {
        "another optimizer": "missing: optim.param_groups.0.betas",
        "no optimizer": "missing: optim.param_groups.0.params",
        "other groups": "missing: optim.param_groups.1.params",
    }[stored]
    with pytest.raises(ValueError, match=expected):
        load_checkpoint(tmp_path / "c", model, optimizer)


def test_a_group_with_other_parameters_is_refused(tmp_path: Path) -> None:
    models = [_Other(), _Other()]
    for number, model in enumerate(models):
        first, third = list(model.first.parameters()), [model.third.weight]
        groups = [{"params": first}, {"params": third}]
        _, optimizer = sidestream.fully_shard(model, torch.optim.AdamW(groups[:: 1 - 2 * number]))
        if number == 0:
            save_checkpoint(tmp_path / "c", model, optimizer)
    with pytest.raises(
        ValueError, match=r"group 0: missing \['third.weight'\], unexpected \['first.b"
    ):
        load_checkpoint(tmp_path / "c", models[1], optimizer)


def _write(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


class _Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("evil",))


def test_unreadable_paths_are_refused_by_name(tmp_path: Path) -> None:
    model = _Other()
    _write(tmp_path, "file", b"text")
    (tmp_path / "folder").mkdir()
    cases = [("absent", "nothing"), ("folder", "a folder without one"), ("file", "a file")]
    for path, found in cases:
        with pytest.raises(FileNotFoundError, match=f"{path}, got {found}"):
            load_checkpoint(tmp_path / path, model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_are_never_unpickled_into_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = _Other()
    state = {"model": model.state_dict(), "extra": {"0": (_Evil(),)}}
    dcp.save(state, checkpoint_id="c")
    with pytest.raises(ValueError, match=r"unsafe unpickling could read under extra.0"):
        load_checkpoint("c", model)
    assert not Path("evil").exists()
    with pytest.raises(TypeError, match="extra: expected numbers, strings, tensors"):
        save_checkpoint("c", model, extra={"evil": _Evil()})
    assert not Path("evil").exists()


def test_saving_replaces_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    model = _Other()
    for step in range(2):
        save_checkpoint(tmp_path / "deep" / "c", model, extra=step)
        assert load_checkpoint(tmp_path / "deep" / "c", model) == step
    assert os.listdir(tmp_path / "deep") == ["c"]
    _write(tmp_path / "mine", "thesis.tex", b"years of work")
    _write(tmp_path, "file", b"text")
    for name, found in [("mine", r"other files \(thesis.tex\)"), ("file", "a file")]:
        with pytest.raises(FileExistsError, match=f"{name}, got {found}; give another path"):
            save_checkpoint(tmp_path / name, model)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", model, extra=5)
    assert load_checkpoint(tmp_path / "empty", model) == 5


def test_a_crash_between_the_two_renames_leaves_the_old_checkpoint_readable(tmp_path: Path) -> None:
    model, path = _Other(), tmp_path / "c"
    save_checkpoint(path, model, extra="old")
    rename = Path.rename

    def crash(source: Path, target: Path) -> Path:
        if source.name == ".c.partial":
            raise KeyboardInterrupt
        return rename(source, target)

    with mock.patch.object(Path, "rename", crash), pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, model, extra="new")
    assert not path.exists()
    assert load_checkpoint(path, model) == "old"
    shutil.copytree(tmp_path / ".c.replaced", tmp_path / ".c.partial")
    (tmp_path / ".c.partial" / "left over").touch()
    save_checkpoint(path, model, extra="newest")
    assert load_checkpoint(path, model) == "newest"
    assert os.listdir(tmp_path) == ["c"] and "left over" not in os.listdir(path)


def _fail_while_writing(rank: int, world_size: int, folder: str) -> tuple[str, Any]:
    model, optimizer = _make(seed=0)
    save_checkpoint(folder, model, optimizer, extra="old")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    writer = mock.patch.object(dcp.FileSystemWriter, "write_data", full_disk)
    with writer if rank == 1 else mock.MagicMock():
        try:
            save_checkpoint(folder, model, optimizer, extra="new")
        except OSError as error:
            message = str(error)
    return message, load_checkpoint(folder, model, optimizer)


def test_a_failure_while_writing_is_raised_on_all_ranks_and_the_old_checkpoint_stays(
    tmp_path: Path,
) -> None:
    for message, extra in run_on_ranks(_fail_while_writing, 2, str(tmp_path / "c"), timeout_s=60):
        assert "no space left, with " in message
        assert extra == "old"
    assert os.listdir(tmp_path) == ["c"]


def _die_while_publishing(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = _make(seed=0)
    save_checkpoint(folder, model, optimizer, extra="old")
    with mock.patch.object(checkpoint_folder, "publish", lambda *_: os._exit(9)):
        save_checkpoint(folder, model, optimizer, extra="new")


def _load_extra(rank: int, world_size: int, folder: str) -> Any:
    model, optimizer = _make(seed=1)
    return load_checkpoint(folder, model, optimizer)


def test_a_rank_that_dies_before_publishing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    with pytest.raises(RanksFailed, match="exited with code 9"):
        run_on_ranks(_die_while_publishing, 2, folder, timeout_s=30)
    assert run_on_ranks(_load_extra, 2, folder, timeout_s=60) == ["old", "old"]


def _disagree(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer = _make(seed=0)
    messages: list[str] = []
    for attempt in (
        lambda: load_checkpoint(folder + "-absent" * rank, model, optimizer),
        lambda: save_checkpoint(folder, model, optimizer, extra=os.getcwd if rank else None),
    ):
        try:
            attempt()
        except (FileNotFoundError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", *_make(seed=0))
    zero, one = run_on_ranks(_disagree, 2, str(tmp_path / "c"), timeout_s=60)
    assert zero[0].startswith("FileNotFoundError: rank 1: path: expected a checkpoint at")
    assert zero[1].startswith("TypeError: rank 1: extra: expected numbers")
    assert one == [message.replace("rank 1: ", "") for message in zero]
