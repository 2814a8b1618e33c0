"""Tables of tuned launches: which file wins, what makes one unusable, and who never reads one."""

import errno
import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from sidestream.kernels import LaunchConfig, tuned

NAME, TRITON = "NVIDIA Test 80GB", "3.6.0"
FILE = "nvidia_test_80gb.json"
GPU = torch.device("cuda", 0)
DEFAULT = LaunchConfig(8192, 8)


def entry(op="pack_", case="bf16", block_bytes=4096, num_warps=4, **more):
    return {"op": op, "case": case, "block_bytes": block_bytes, "num_warps": num_warps, **more}


def document(*entries, **changed):
    head = {"schema_version": 1, "kind": "tuned", "device": NAME, "triton": TRITON}
    return {**head, "entries": list(entries), **changed}


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Empty folders in the place of the package's, the user's and the variable's."""
    monkeypatch.setattr(tuned, "PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    return {
        "package": tmp_path / "package",
        "user": tmp_path / "config" / "sidestream" / "tuned",
        "variable": tmp_path / "variable",
    }


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that may be tuned, as far as tables are concerned."""
    monkeypatch.setattr(tuned, "device_name", lambda device: NAME)
    monkeypatch.setattr(tuned, "triton_version", lambda: TRITON)
    tuned.table_of.cache_clear()
    yield
    tuned.table_of.cache_clear()


def test_later_places_win_entry_by_entry(places, monkeypatch):
    cases = ("a", "b", "c")
    for index, place in enumerate(("package", "user", "variable")):
        entries = [entry(case=case, block_bytes=1024 << index) for case in cases[index:]]
        write(places[place], document(*entries))
    blocks = {
        key[1]: config.block_bytes for key, config in tuned.load_table(NAME, TRITON).entries.items()
    }
    assert blocks == {"a": 1024, "b": 2048, "c": 2048}
    for path in (places["variable"], places["variable"] / FILE):
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        table = tuned.load_table(NAME, TRITON)
        blocks = {key[1]: config.block_bytes for key, config in table.entries.items()}
        assert blocks == {"a": 1024, "b": 2048, "c": 4096}
        assert table.sources == tuple(str(folder / FILE) for folder in places.values())


def test_the_user_folder_is_below_home_by_default(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(tuned.user_folder()) == "/somewhere/.config/sidestream/tuned"


BAD = {
    "no JSON": ('{"kind": ', "expected JSON, got a damaged file"),
    "too deep": ("[" * 100_000, "expected JSON, got a damaged file"),
    "bytes": ("\x00\xff", "expected JSON, got a damaged file"),
    "a list": ("[]", "expected a document of kind 'tuned'"),
    "another kind": (document(kind="kernels"), "expected a document of kind 'tuned'"),
    "another schema": (document(schema_version=2), "schema_version: expected 1, got 2"),
    "another device": (document(device="H100"), f"device: expected {NAME!r}, got 'H100'"),
    "another triton": (document(triton="3.7.0"), "triton: expected 3.6, got '3.7.0'"),
    "no triton": (document(triton=None), "triton: expected 3.6, got None"),
    "no entries": (document(entries=None), "entries: expected a list"),
    "an entry that is none": (document(7), "expected the names of an op and a case"),
    "no case": (document(entry(case=None)), "expected the names of an op and a case"),
    "unknown op": (document(entry(op="fly_")), "got op 'fly_'"),
    "not a power of two": (document(entry(num_warps=3)), "num_warps: expected a power of two"),
    "a fraction": (document(entry(num_warps=4.0)), "expected whole numbers"),
    "true": (document(entry(num_warps=True)), "expected whole numbers"),
    "too many warps": (document(entry(num_warps=32)), "num_warps: expected at most 16, got 32"),
    "a tiny block": (document(entry(block_bytes=256)), "block_bytes of pack_: expected 1024 to"),
    "a huge block": (document(entry(block_bytes=2**20)), "block_bytes of pack_: expected 1024 to"),
    "another chunk of the norm": (
        document(entry(op="l2_norm_", block_bytes=32768)),
        "block_bytes of l2_norm_: expected 65536 to 65536",
    ),
    "twice": (document(entry(), entry(num_warps=8)), "expected each case once"),
}


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_a_bad_file_is_left_out_with_one_warning(places, gpu, caplog, content, reason):
    """Also its good entries; what other files say holds."""
    write(places["package"], document(entry(case="fp32", num_warps=16)))
    path = write(places["user"], content)
    with caplog.at_level(logging.WARNING, "sidestream"):
        for _ in range(3):
            assert tuned.config_for("pack_", "bf16", DEFAULT, GPU) is DEFAULT
    assert tuned.config_for("pack_", "fp32", DEFAULT, GPU) == LaunchConfig(4096, 16)
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert reason in record.getMessage()
    assert "; " in record.getMessage().partition(reason)[2]  # what to do


def test_where_nobody_may_look_is_no_error(places, gpu, caplog, monkeypatch):
    """Only what the variable names is missed."""
    write(places["package"], document(entry()))
    write(places["variable"], document(entry(case="fp32")))
    monkeypatch.setenv(tuned.VARIABLE, str(places["variable"]))
    hidden = (str(places["user"]), str(places["variable"]))
    stat = os.stat

    def refusing(path, *args, **options):
        if str(path).startswith(hidden):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    assert tuned.config_for("pack_", "bf16", DEFAULT, GPU) == LaunchConfig(4096, 4)
    assert tuned.config_for("pack_", "fp32", DEFAULT, GPU) is DEFAULT
    (record,) = caplog.records
    assert f"{places['variable']}: not used" in record.getMessage()


def test_a_folder_that_may_not_be_entered_is_told(places, caplog, monkeypatch):
    places["variable"].mkdir()
    monkeypatch.setenv(tuned.VARIABLE, str(places["variable"]))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert tuned.load_table(NAME, TRITON) == tuned.Table()
    assert len(caplog.records) == 1


def test_a_missing_file_is_told_only_where_it_was_named(places, caplog, monkeypatch):
    places["variable"].mkdir()
    for path, count in ((places["variable"], 0), (places["variable"] / "other.json", 1)):
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        caplog.clear()
        assert tuned.load_table(NAME, TRITON) == tuned.Table()
        assert len(caplog.records) == count
    assert "No such file" in caplog.records[0].getMessage()


def test_a_table_of_the_same_minor_version_is_used(places):
    write(places["user"], document(entry()))
    assert tuned.load_table(NAME, "3.6.1+git").entries == {("pack_", "bf16"): LaunchConfig(4096, 4)}


def test_what_no_entry_is_for_takes_its_default(places, gpu):
    write(places["user"], document(entry()))
    assert tuned.config_for("pack_", "bf16", DEFAULT, GPU) == LaunchConfig(4096, 4)
    for key in (("pack_", "fp32"), ("unpack_", "bf16")):
        assert tuned.config_for(*key, DEFAULT, GPU) is DEFAULT


def test_a_table_is_read_once_per_device(places, gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(tuned, "load_table", lambda *args: calls.append(args) or tuned.Table())
    for _ in range(3):
        tuned.config_for("pack_", "bf16", DEFAULT, GPU)
        tuned.table_of(GPU)
    assert calls == [(NAME, TRITON)]


def test_a_cpu_reads_nothing(places, monkeypatch):
    """The interpreter runs there."""
    write(places["user"], document(entry()))
    monkeypatch.setattr(tuned, "load_table", None)
    cpu = torch.device("cpu")
    assert tuned.config_for("pack_", "bf16", DEFAULT, cpu) is DEFAULT
    assert tuned.table_of(cpu) == tuned.Table()


def test_the_digest_is_of_the_entries_alone_and_the_same_in_every_process():
    one, other = LaunchConfig(4096, 4), LaunchConfig(8192, 8)
    entries = {("pack_", "bf16"): one, ("reduce_", "x"): other}
    table = tuned.Table(entries, ("a.json",))
    same = tuned.Table(dict(reversed(entries.items())), ("b.json", "c.json"))
    assert table.digest == same.digest == tuned.Table(entries).digest
    changed = [
        {("pack_", "bf16"): other, ("reduce_", "x"): other},
        {("pack_", "bf16"): one},
        {("pack_", "fp16"): one, ("reduce_", "x"): other},
    ]
    assert len({table.digest, *(tuned.Table(entries).digest for entries in changed)}) == 4
    script = (
        "from sidestream.kernels import LaunchConfig as L, tuned\n"
        "print(tuned.Table({('reduce_', 'x'): L(8192, 8), ('pack_', 'bf16'): L(4096, 4)}).digest)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == table.digest


def test_forced_launches_tell_what_was_asked_and_end(places, gpu):
    write(places["user"], document(entry()))
    outer, inner = LaunchConfig(1024, 2), LaunchConfig(2048, 2)
    with tuned.forcing("pack_", outer) as forced:
        assert tuned.config_for("pack_", "bf16", DEFAULT, GPU) == outer
        assert tuned.config_for("unpack_", "bf16", DEFAULT, GPU) is DEFAULT
        with tuned.forcing("pack_", inner):
            assert tuned.config_for("pack_", "fp32", DEFAULT, torch.device("cpu")) == inner
        assert tuned.config_for("pack_", "fp16", DEFAULT, GPU) == outer
    assert forced.asked == {"bf16": DEFAULT, "fp16": DEFAULT}
    assert tuned.config_for("pack_", "bf16", DEFAULT, GPU) == LaunchConfig(4096, 4)
    with (
        pytest.raises(ValueError, match="block_bytes of pack_"),
        tuned.forcing("pack_", LaunchConfig(64, 1)),
    ):
        pass


def test_tables_are_packaged():
    root = Path(tuned.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert root / "kernels" / "tuned" == tuned.PACKAGE_FOLDER
    assert project["tool"]["setuptools"]["package-data"]["sidestream.kernels"] == ["tuned/*.json"]


def test_shipped_tables_are_good():
    for path in tuned.PACKAGE_FOLDER.glob("*.json"):
        content = tuned.read_document(path)
        assert path.name == tuned.file_name(content["device"])
        assert tuned.read_entries(path, content["device"], content["triton"])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_refused_and_never_waited_for(make, tmp_path):
    make(tmp_path / FILE)
    with pytest.raises(tuned.TableError, match="got a folder, a pipe or a device; correct"):
        tuned.read_document(tmp_path / FILE)
