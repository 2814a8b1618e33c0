"""Forged checkpoints: no code of theirs runs, and what contradicts itself is refused."""

import hashlib
import json
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from sidestream.tests.sharding.checkpoint.whole import Case, damaged

pytestmark = pytest.mark.timeout(120)


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
    "deep": (lambda c: "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "a name twice": (lambda c: '{"a": 1, "a": 2}', "twice in one object"),
    "no finite number": (lambda c: '{"format_version": NaN}', "no number of JSON"),
    "a name too many": (
        lambda c: _rename(c, "model.first.bias", "model.first.bios"),
        "missing: model.first.bias",
    ),
    "a long list": (
        lambda c: c["paths"].update({LR: ["optim", "param_groups", 2**40, "lr"]}),
        "expected its path",
    ),
}


@pytest.mark.parametrize("case", ["ours"], indirect=True)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_manifest(case: Case, forgery: str, tmp_path: Path) -> None:
    forge, message = FORGERIES[forgery]
    told = forged(case, forge, tmp_path)
    assert message in told and told != "loaded", told


def _storage(metadata: Any, key: str = "model.first.weight") -> Any:
    return next(at for index, at in metadata.storage_data.items() if index.fqn == key)


def _drop(metadata: Any, key: str) -> None:
    del metadata.state_dict_metadata[key]


# What an edited `.metadata` says: its pickle is sound, and nothing has a sum.
LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a gap": (
        lambda m: setattr(m.state_dict_metadata["model.first.bias"], "size", torch.Size([6])),
        "chunks that cover its shape",
    ),
    "no chunks": (
        lambda m: m.state_dict_metadata["model.first.bias"].chunks.clear(),
        "what is stored to be in the index",
    ),
    "a key gone": (lambda m: _drop(m, "model.first.bias"), "what is stored to be in the index"),
    "another key's path": (
        lambda m: m.planner_data.update({"model.first.bias": ("model", "third.bias")}),
        "'model.first.bias': expected its path",
    ),
    "another key's bytes": (
        lambda m: setattr(_storage(m), "offset", _storage(m, "model.third.weight").offset),
        "apart, got both",
    ),
    "upwards": (
        lambda m: setattr(_storage(m), "relative_path", "../c/__0_0.distcp"),
        "in the checkpoint's own folder",
    ),
    "absolute": (
        lambda m: setattr(_storage(m), "relative_path", "/dev/zero"),
        "in the checkpoint's own folder",
    ),
    "a hidden pipe": (lambda m: setattr(_storage(m), "length", 10**7), "apart, got both"),
    "compressed": (
        lambda m: setattr(_storage(m), "transform_descriptors", ["zstd"]),
        "save it without extensions",
    ),
    "text as a size": (
        lambda m: setattr(m.state_dict_metadata["model.first.bias"], "size", "12"),
        "expected counts",
    ),
    "another shape": (
        lambda m: (
            setattr(m.state_dict_metadata["model.first.weight"], "size", torch.Size([6, 5])),
            setattr(
                m.state_dict_metadata["model.first.weight"].chunks[0], "sizes", torch.Size([6, 5])
            ),
        ),
        "shape of model.first.weight",
    ),
    "another dtype": (
        lambda m: setattr(
            m.state_dict_metadata["model.first.weight"].properties, "dtype", torch.int32
        ),
        "got damaged bytes",
    ),
    "no metadata": (lambda m: [m], "expected Metadata, got list"),
    "nothing stored": (lambda m: setattr(m, "storage_data", None), "expected dict, got NoneType"),
    "an entry of state gone": (
        lambda m: (
            _drop(m, "optim.state.norm.bias.exp_avg"),
            m.storage_data.pop(MetadataIndex("optim.state.norm.bias.exp_avg", [0])),
        ),
        "expected the entries ['exp_avg', 'exp_avg_sq', 'step'] of the other parameters",
    ),
}


@pytest.mark.parametrize("case", ["plain"], indirect=True)
@pytest.mark.parametrize("lie", LIES)
def test_plain_metadata_that_contradicts_itself(case: Case, lie: str, tmp_path: Path) -> None:
    edit, message = LIES[lie]
    metadata = pickle.loads((case.folder / ".metadata").read_bytes())
    edited = edit(metadata)
    content = pickle.dumps(edited if isinstance(edited, list) else metadata)
    told = damaged(case, ".metadata", content, tmp_path)
    assert message in told, told


@pytest.mark.parametrize("case", ["ours"], indirect=True)
def test_a_manifest_that_is_gone_is_missed(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(case.folder, folder)
    (folder / "sidestream.json").unlink()
    assert "expected sidestream.json beside .metadata, got none" in case.try_to_load(folder)


# A tuple of twice a tuple of twice ..., each of them one object.
DOUBLED = b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))


BOMBS: dict[str, bytes] = {
    "a large memo": b"\x80\x04}r\x00\x00\x00\x10.",
    "a key that takes for ever to hash": b"\x80\x04})\x94" + DOUBLED + b"K\x00s.",
    "an opcode that no metadata has": b"\x80\x04\x8f.",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("bomb", BOMBS)
def test_metadata_that_would_take_all_memory_or_time(case: Case, bomb: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(BOMBS[bomb])
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert case.try_to_load(tmp_path) != "loaded"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 200 * 1024


def _crossing(content: dict[str, Any]) -> None:
    """Chunks that all meet in every dimension that they could be told apart by."""
    chunks = [[[0, i], [2**20, 1], "__0_0.distcp", 0, 2**23] for i in range(4000)]
    content["tensors"]["model.first.weight"].update(shape=[2**20, 4000], chunks=chunks)
    content["tensors"]["model.first.weight"]["chunks"] = [
        [[i, 0], [1, 1], "__0_0.distcp", 0, 8] for i in range(3000)
    ] + [[[0, i], [3000, 1], "__0_0.distcp", 0, 12000] for i in range(3000)]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", ["ours"], indirect=True)
def test_chunks_in_no_order_are_refused_in_time(case: Case, tmp_path: Path) -> None:
    assert forged(case, _crossing, tmp_path) != "loaded"


def _extra_as(path: list[Any]) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["paths"].update({"extra.0": path})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", ["ours"], indirect=True)
@pytest.mark.parametrize("path", [["extra"], ["extra", 0], [], ["x"] * 200], ids=repr)
def test_an_extra_at_another_path_is_refused(case: Case, path: list[Any], tmp_path: Path) -> None:
    assert forged(case, _extra_as(path), tmp_path) != "loaded"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", ["plain"], indirect=True)
def test_a_compressed_value_is_not_unpacked(case: Case, tmp_path: Path) -> None:
    folder = with_planted_value(case, pickle.dumps(0.5, protocol=2), tmp_path / "c")
    with zipfile.ZipFile(folder / "__9_0.distcp", "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("archive/data.pkl", pickle.dumps(0.5, protocol=2) + bytes(10**6))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("optim.param_groups.0.lr")]
    place.length = (folder / "__9_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "got damaged bytes" in case.try_to_load(folder)
