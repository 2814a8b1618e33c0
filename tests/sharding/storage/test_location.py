"""Paths and URLs: what a text names, which driver is missing, and the verbs over memory://."""

import os
import pickle
import sys
from pathlib import Path

import pytest

import sidestream as ss
from sidestream.sharding import storage
from sidestream.sharding.storage import Url, location_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run/", Url("s3", "bucket/run")),
        ("memory://a", Url("memory", "a")),
        ("msc://profile/a b", Url("msc", "profile/a b")),
        ("file:///tmp/x", Path("/tmp/x")),
        ("a/b:c//d", Path("a/b:c//d")),
        ("S3://Bucket/run", Url("s3", "Bucket/run")),
        ("FILE:///tmp/a%20b", Path("/tmp/a%20b")),
        ("C:\\x", Path("C:\\x")),
    ],
    ids=["s3", "memory", "msc", "file", "path", "capitals", "no decoding", "backslash"],
)
def test_a_text_names_a_path_or_a_url(text: str, expected: object) -> None:
    assert location_of(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "s3://",
            "s3://a//b",
            "s3://a/../b",
            "s3://a/./b",
            "s3://a/\nb",
            "s3:///",
            "s3://a/b?versionId=1",
        ),
        *("s3:/bucket/run", "simplecache::s3://a/b", " s3://a/b", "C:/x", "file:/x"),
    ],
    ids=repr,
)
def test_what_names_no_place_is_refused(text: str) -> None:
    """A path that begins as a URL does would be a folder here that nobody looks for."""
    with pytest.raises(ValueError, match="expected a URL such as s3://bucket/folder"):
        location_of(text)


@pytest.mark.parametrize("text", ["file://host/x", "file://x", "local:///x"])
def test_files_of_other_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected file:/// and an absolute path"):
        location_of(text)


def test_a_url_that_pathlib_has_shortened_is_refused() -> None:
    with pytest.raises(ValueError, match="pass URLs as text"):
        location_of(Path("s3://bucket/run"))


def test_a_driver_that_needs_more_than_a_url_is_told() -> None:
    with pytest.raises(ValueError, match=r"for reference:// URLs that needs nothing else, got Ty"):
        ss.remove_old_checkpoints("reference://a/b", keep=1)


def test_names_are_no_patterns() -> None:
    """fsspec would remove what `a[bc]` means as a pattern."""
    files = [f"memory://pattern/{name}/x" for name in ("ab", "a[bc]", "a*")]
    for file in files:
        storage.write_whole(location_of(file), b"")
    storage.remove_all(location_of("memory://pattern/a[bc]"))
    storage.remove_files(location_of("memory://pattern/a*"), ["x", "gone"])
    assert [storage.is_file(location_of(file)) for file in files] == [True, False, False]


def test_a_url_is_a_name_with_names_around() -> None:
    url = location_of("s3://bucket/run/step")
    assert isinstance(url, Url)
    assert (url.name, str(url.parent), os.fspath(url / "x")) == (
        "step",
        "s3://bucket/run",
        "s3://bucket/run/step/x",
    )
    assert str(url.with_name("y")) == "s3://bucket/run/y"
    assert [str(folder) for folder in url.parents] == ["s3://bucket/run", "s3://bucket"]
    assert pickle.loads(pickle.dumps(url)) == url


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("gs://bucket/run", "install gcsfs"),
        ("az://bucket/run", "[Ii]nstall adlfs"),
        ("nowhere://bucket/run", "fsspec knows no such protocol"),
    ],
    ids=["gs", "az", "unknown"],
)
def test_a_missing_driver_is_told_with_its_package(url: str, package: str) -> None:
    with pytest.raises(ValueError, match=f"path: expected a driver for .*{package}"):
        ss.remove_old_checkpoints(url, keep=1)


def test_a_missing_fsspec_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match="pip install fsspec"):
        _ = Url("memory", "a").driver


@pytest.fixture(params=["path", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> storage.Location:
    if request.param == "path":
        return tmp_path
    return location_of(f"memory://{tmp_path.name}")


def test_the_verbs(place: storage.Location) -> None:
    """The same ones with the same results on a disk and in an object store."""
    storage.write_whole(place / "a", b"old")
    storage.write_whole(place / "a", b"new")
    storage.make_folder(place / "below")
    with storage.create_file(place / "below" / "b") as file:
        assert file.write(memoryview(b"xy")) == 2
    assert storage.entries_of(place) == {"a": False, "below": True}
    assert storage.is_file(place / "a") and not storage.is_file(place / "below")
    assert storage.read_first(place / "a", 2) == b"ne"
    storage.remove_files(place, ["a", "gone"])
    storage.remove_all(place / "below")
    storage.remove_all(place / "below")
    assert storage.entries_of(place) == {}
    with pytest.raises(FileNotFoundError):
        storage.open_file(place / "a")


def test_ranges_are_what_is_there(place: storage.Location) -> None:
    content = os.urandom(1_000_003)
    storage.write_whole(place / "a", content)
    with storage.open_file(place / "a") as file:
        assert file.num_bytes == len(content)
        for start, count in [(0, 5), (262_140, 9), (999_999, 100), (1, 900_000), (2_000_000, 4)]:
            memory = bytearray(count)
            rest = file.read_at(memoryview(memory), start)
            assert memory[: count - len(rest)] == content[start : start + count]


def test_what_is_abandoned_is_not_there() -> None:
    url = location_of("memory://abandoned/a")
    storage.write_whole(url, b"old")
    with pytest.raises(ZeroDivisionError), storage.create_file(url) as file:
        file.write(memoryview(b"half"))
        raise ZeroDivisionError
    # memory:// shows what is being written; an upload of S3 is looked at in test_s3.py.
    assert storage.entries_of(location_of("memory://abandoned")) == {"a": False}
