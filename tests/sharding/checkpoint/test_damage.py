"""Damaged and forged checkpoints: refused with one line and nothing changed, or loaded exactly.

Every kind is tried on a checkpoint of ours, which has a manifest, and on a plain one of
torch.distributed.checkpoint, which has but the checksums inside its archives.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.optimizer_state import named_state

pytestmark = pytest.mark.timeout(120)

EXTRA = {"step": 7, "note": "a text"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 6)
        self.third = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.norm(self.first(x))))


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    ss.fully_shard(model, optimizer)
    for _ in range(seed + 1):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A sum over all that a checkpoint holds."""
    total = hashlib.sha256()
    named = named_state(runtime_of(model), optimizer)
    for name, tensor in ss.full_state_dict(model).items():
        total.update(name.encode() + tensor.numpy().tobytes())
    for name, entries in named["state"].items():
        for key, value in sorted(entries.items()):
            local = getattr(value, "local", value)
            total.update(f"{name} {key}".encode() + local.numpy().tobytes())
    total.update(repr(named["param_groups"]).encode())
    return total.hexdigest()


@dataclass
class Case:
    """A whole checkpoint, what loading it gives, and a model to load into."""

    folder: Path
    extra: Any
    expected: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def try_to_load(self, folder: Path) -> str:
        """The error's message, or "loaded"."""
        before = everything(self.model, self.optimizer)
        try:
            extra = ss.load_checkpoint(folder, self.model, self.optimizer)
        except (ValueError, OSError) as error:
            assert everything(self.model, self.optimizer) == before, "changed, though refused"
            assert "\n  " in str(error) or "\n" not in str(error), "more than a line"
            assert str(folder) in str(error), error
            return str(error)
        assert everything(self.model, self.optimizer) == self.expected, "loaded something else"
        assert extra == self.extra
        ss.load_checkpoint(self.folder.with_name("before"), self.model, self.optimizer)
        assert everything(self.model, self.optimizer) == before
        return "loaded"


@pytest.fixture(scope="module", params=["ours", "plain"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp(request.param)
    model, optimizer = make(0)
    if request.param == "ours":
        ss.save_checkpoint(root / "c", model, optimizer, extra=EXTRA)
    else:
        state = {"model": model.state_dict(), "optim": named_state(runtime_of(model), optimizer)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=root / "c")
    other, other_optimizer = make(1)
    ss.save_checkpoint(root / "before", other, other_optimizer)
    extra = EXTRA if request.param == "ours" else None
    case = Case(root / "c", extra, everything(model, optimizer), other, other_optimizer)
    assert case.try_to_load(case.folder) == "loaded"
    return case


def names_in(case: Case, *, index: bool) -> list[str]:
    files = sorted(os.listdir(case.folder))
    return [name for name in files if name.endswith(".distcp") != index]


def damaged(case: Case, name: str, content: bytes, tmp_path: Path) -> str:
    """What loading tells when file `name` holds `content` instead."""
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(case.folder, folder)
    (folder / name).write_bytes(content)
    return case.try_to_load(folder)


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize(("index", "count"), [(True, 300), (False, 100)], ids=["index", "data"])
def test_a_flipped_bit(case: Case, index: bool, count: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    told: list[str] = []
    for number in range(count):
        names = names_in(case, index=index)
        name = names[number % len(names)]
        content = flipped((case.folder / name).read_bytes(), rng)
        told.append(damaged(case, name, content, tmp_path))
    if case.extra is not None:
        assert "loaded" not in told, "a manifest finds every flipped bit"
    assert set(told) != {"loaded"}


def test_a_truncated_file(case: Case, tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(40):
        names = sorted(os.listdir(case.folder))
        name = names[number % len(names)]
        content = (case.folder / name).read_bytes()
        assert damaged(case, name, content[: rng.randrange(len(content))], tmp_path) != "loaded"


@pytest.mark.parametrize("case", ["ours"], indirect=True)
def test_another_files_content_in_place_of_a_file(case: Case, tmp_path: Path) -> None:
    """What a later step or another rank wrote, whole in itself; a plain checkpoint has no sums."""
    later = case.folder.with_name("before")
    for name in sorted(os.listdir(case.folder)):
        told = damaged(case, name, (later / name).read_bytes(), tmp_path)
        assert "expected" in told and told != "loaded", name


# What pickles of attackers call; `evil` would appear in the working folder.
GADGETS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "os.system": ("os system", ("touch evil",)),
    "posix.system": ("posix system", ("touch evil",)),
    "subprocess": ("subprocess Popen", (["touch", "evil"],)),
    "eval": ("builtins eval", ("open('evil', 'w')",)),
    "exec": ("builtins exec", ("open('evil', 'w')",)),
    "open": ("builtins open", ("evil", "w")),
    "old name of builtins": ("__builtin__ eval", ("open('evil', 'w')",)),
    "import": ("builtins __import__", ("antigravity",)),
    "getattr": ("builtins getattr", ("", "join")),
    "mkdir": ("os mkdir", ("evil",)),
    "touch": ("pathlib Path.touch", ("evil",)),
    "what pathlib imports": ("pathlib os.mkdir", ("evil",)),
    "attrgetter of pathlib": ("pathlib attrgetter", ("system",)),
    "what metadata imports": ("torch.distributed.checkpoint.metadata os.mkdir", ("evil",)),
    "what filesystem imports": ("torch.distributed.checkpoint.filesystem os.mkdir", ("evil",)),
    "a class that filesystem imports": (
        "torch.distributed.checkpoint.filesystem ThreadPoolExecutor",
        (1,),
    ),
    "a store": ("torch.distributed TCPStore", ("127.0.0.1", 9)),
    "torch.load": ("torch load", ("evil",)),
    "torch.hub": ("torch.hub load", ("evil", "evil")),
    "a function of torch": ("torch from_file", ("evil", True, 1)),
    "pickle": ("pickle loads", (b"cos\nmkdir\n(X\x04\x00\x00\x00eviltR.",)),
    "runpy": ("runpy run_path", ("evil.py",)),
    "timeit": ("timeit timeit", ("open('evil', 'w')",)),
    "a library": ("ctypes CDLL", ("libm.so.6",)),
    "a code object": ("types FunctionType", ()),
}


class Gadget:
    """Pickled as a call of what `names` names, without importing it."""

    def __init__(self, names: str, args: tuple[Any, ...]) -> None:
        self.names, self.args = names, args

    def pickled(self) -> bytes:
        module, name = self.names.split(" ")
        parts = b"".join(pickle.dumps(arg, protocol=4)[2:-1] for arg in self.args)
        named = pickle.dumps(module, protocol=4)[2:-1] + pickle.dumps(name, protocol=4)[2:-1]
        return b"\x80\x04" + named + b"\x93(" + parts + b"tR."


@pytest.mark.parametrize("gadget", GADGETS)
def test_a_planted_call(
    case: Case, gadget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled = Gadget(*GADGETS[gadget]).pickled()
    (tmp_path / "evil.py").write_text("open('evil', 'w')")
    assert damaged(case, ".metadata", pickled, tmp_path) != "loaded"
    alone = tmp_path / "alone"  # without a manifest, so that it is read
    alone.mkdir()
    (alone / ".metadata").write_bytes(pickled)
    assert f"names {GADGETS[gadget][0].replace(' ', '.')}" in case.try_to_load(alone)
    if case.extra is None:
        told = case.try_to_load(with_planted_value(case, pickled, tmp_path / "values"))
        assert "got objects that only unsafe unpickling could read under optim.param_gr" in told
    assert "evil" not in os.listdir(tmp_path)


def with_planted_value(case: Case, pickled: bytes, folder: Path) -> Path:
    """A copy of the plain checkpoint in which an option of the optimizer is `pickled`."""
    shutil.copytree(case.folder, folder)
    with zipfile.ZipFile(folder / "__9_0.distcp", "w") as files:
        files.writestr("archive/data.pkl", pickled)
        files.writestr("archive/byteorder", b"little")
        files.writestr("archive/version", b"3\n")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("optim.param_groups.0.lr")]
    place.relative_path, place.offset = "__9_0.distcp", 0
    place.length = (folder / "__9_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


LR = "optim.param_groups.0.lr"


def forged(case: Case, forge: Callable[[dict[str, Any]], Any], tmp_path: Path) -> str:
    """What loading tells when the manifest's content is forged, its sum right again."""
    text = (case.folder / "sidestream.json").read_text()
    content = json.loads(text)["checkpoint"]
    changed = forge(content)
    body = changed if isinstance(changed, str) else json.dumps(content)
    total = hashlib.sha256(body.encode()).hexdigest()
    new = f'{{"sha256": "{total}", "checkpoint":\n{body}\n}}\n'
    return damaged(case, "sidestream.json", new.encode(), tmp_path)


def _chunk(content: dict[str, Any], key: str = "model.first.weight") -> list[Any]:
    chunk: list[Any] = content["tensors"][key]["chunks"][0]
    return chunk


def _move(content: dict[str, Any], file: str) -> None:
    _chunk(content)[2] = file
    content["digests"][file] = content["digests"]["__0_0.distcp"]


def _rename(content: dict[str, Any], old: str, new: str) -> None:
    content["tensors"][new] = content["tensors"].pop(old)
    content["paths"][new] = [*content["paths"].pop(old)[:-1], new.removeprefix("model.")]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a gap": (lambda c: _chunk(c).__setitem__(1, [4, 6]), "chunks that cover its shape"),
    "outside": (lambda c: _chunk(c).__setitem__(0, [1, 0]), "chunks inside its shape"),
    "negative": (lambda c: _chunk(c).__setitem__(0, [-1, 0]), "expected counts"),
    "no chunks": (lambda c: c["tensors"]["model.first.bias"].update(chunks=[]), "cover"),
    "twice": (
        lambda c: c["tensors"]["model.first.weight"].update(chunks=[_chunk(c)] * 2),
        "chunks that cover",
    ),
    "another's bytes": (
        lambda c: _chunk(c).__setitem__(3, _chunk(c, "model.third.weight")[3]),
        "apart, got both",
    ),
    "beyond the file": (lambda c: _chunk(c).__setitem__(4, 10**9), "expected bytes"),
    "no number": (lambda c: _chunk(c).__setitem__(4, "many"), "expected counts"),
    "true": (lambda c: _chunk(c).__setitem__(3, True), "expected counts"),
    "a huge number": (lambda c: _chunk(c).__setitem__(3, 10**30), "expected counts"),
    "upwards": (lambda c: _move(c, "../before/__0_0.distcp"), "in the checkpoint's own folder"),
    "absolute": (lambda c: _move(c, "/etc/hostname"), "in the checkpoint's own folder"),
    "no name": (lambda c: _move(c, ""), "the name of a file"),
    "a zero byte": (lambda c: _move(c, "a\0b"), "the name of a file"),
    "another dtype": (
        lambda c: c["tensors"]["model.first.weight"].update(dtype="float33"),
        "float33",
    ),
    "a wider dtype": (
        lambda c: c["tensors"]["model.first.weight"].update(dtype="float64"),
        "got damaged bytes",
    ),
    "another version": (lambda c: c.update(format_version=3), "expected format_version 2"),
    "no tensors": (lambda c: c.pop("tensors"), "KeyError: 'tensors'"),
    "a list": (lambda c: "[]", "the fields of format 2"),
    "no JSON": (lambda c: "{", "the fields of format 2"),
    "deep": (lambda c: "[" * 100_000 + "]" * 100_000, "RecursionError"),
    "a name twice": (lambda c: '{"a": 1, "a": 2}', "every name once"),
    "no finite number": (lambda c: '{"format_version": NaN}', "expected numbers"),
    "a name too many": (
        lambda c: _rename(c, "model.first.bias", "model.first.bios"),
        "missing: model.first.bias",
    ),
    "a long list": (
        lambda c: c["paths"].update({LR: ["optim", "param_groups", 2**40, "lr"]}),
        "missing: optim.param_groups.0.lr",
    ),
}


@pytest.mark.parametrize("case", ["ours"], indirect=True)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest(case: Case, forgery: str, tmp_path: Path) -> None:
    forge, message = FORGERIES[forgery]
    told = forged(case, forge, tmp_path)
    assert message in told and told != "loaded", told


ODD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "got a pipe"),
    "folder": (Path.mkdir, "got a folder"),
    "link to a device": (lambda file: file.symlink_to("/dev/zero"), "got a device"),
    "link to nothing": (lambda file: file.symlink_to("nowhere"), "got none"),
    "link to itself": (lambda file: file.symlink_to(file), ""),
    "nothing": (lambda file: None, "got "),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_refused_and_never_waited_for(
    case: Case, kind: str, tmp_path: Path
) -> None:
    make_odd, message = ODD_FILES[kind]
    for name in sorted(os.listdir(case.folder)):
        folder = tmp_path / name
        shutil.copytree(case.folder, folder)
        (folder / name).unlink()
        make_odd(folder / name)
        told = case.try_to_load(folder)
        assert told != "loaded" and message in told, (name, told)
