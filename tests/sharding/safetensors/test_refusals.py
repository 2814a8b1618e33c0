"""Safetensors files that are damaged, planted or do not fit: refused before anything is loaded."""

import contextlib
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.safetensors.files import Source, open_model
from sidestream.sharding.safetensors.format import parse_header
from sidestream.tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(60)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
HEADER: dict[str, Any] = {
    "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]},
}


def make() -> nn.Linear:
    return nn.Linear(3, 2)


def content(header: Any, data_bytes: int = 32, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + bytes(data_bytes)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **fields}}


def without(name: str, field: str) -> dict[str, Any]:
    return {**HEADER, name: {k: v for k, v in HEADER[name].items() if k != field}}


TWICE = (
    json.dumps(HEADER)[:-1].encode() + b', "bias": ' + json.dumps(HEADER["bias"]).encode() + b"}"
)
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at least 8 bytes, got 0"),
    "seven bytes": (b"\x01" * 7, "at least 8 bytes, got 7"),
    "header past the end": (content(HEADER, length=4000), "a length of 4000"),
    "header of exabytes": (content(HEADER, length=2**63), "a length of 9223372036854775808"),
    "no header": (content(b"", length=0), r"starts with '\{', got b''"),
    "no object": (content([1]), r"starts with '\{'"),
    "no JSON": (content(b'{"weight": '), "expected a JSON object as header"),
    "not UTF-8": (content(b'{"\xff": 1}'), "expected a JSON object as header"),
    "too deep": (content(b'{"a":' + b"[" * 100_000), "expected a JSON object as header"),
    "name twice": (content(TWICE), "'bias' twice in one object"),
    "half a surrogate": (content({"\ud800": HEADER["bias"]}), "a name in UTF-8"),
    "metadata of numbers": (content({"__metadata__": {"a": 1}, **HEADER}), "texts in __metadata__"),
    "metadata no object": (content({"__metadata__": [], **HEADER}), "texts in __metadata__"),
    "entry no object": (content({**HEADER, "bias": 3}), "of 'bias', got 3"),
    "no dtype": (content(without("bias", "dtype")), "expected .* of 'bias'"),
    "no shape": (content(without("bias", "shape")), "expected .* of 'bias'"),
    "unknown field": (content(changed("bias", strides=[1])), "expected .* of 'bias'"),
    "unknown dtype": (content(changed("bias", dtype="F4")), "as dtype of 'bias', got 'F4'"),
    "dtype a list": (content(changed("bias", dtype=["F32"])), "as dtype of 'bias'"),
    "negative size": (content(changed("bias", shape=[-2])), "sizes as shape of 'bias'"),
    "size of a bool": (content(changed("bias", shape=[2, True])), "sizes as shape of 'bias'"),
    "size of a float": (content(changed("bias", shape=[2.0])), "sizes as shape of 'bias'"),
    "huge size": (content(changed("bias", shape=[10**30])), "sizes as shape of 'bias'"),
    "huge product": (content(changed("bias", shape=[2**40, 2**40])), "expected .* bytes of 'bias'"),
    "too many sizes": (content(changed("bias", shape=[1] * 65)), "sizes as shape of 'bias'"),
    "one offset": (content(changed("bias", data_offsets=[24])), "as offsets of 'bias'"),
    "offsets turned": (content(changed("bias", data_offsets=[32, 24])), "gap before 'bias'"),
    "negative offset": (content(changed("bias", data_offsets=[-8, 0])), "as offsets of 'bias'"),
    "overlap": (content(changed("bias", data_offsets=[20, 28])), "an overlap at 'bias'"),
    "gap": (content(changed("bias", data_offsets=[28, 36]), 36), "a gap before 'bias'"),
    "gap at first": (content(changed("weight", data_offsets=[4, 28])), "a gap before 'weight'"),
    "past the end": (content(changed("bias", data_offsets=[24, 400])), "8 bytes of 'bias'"),
    "wrong numel": (content(changed("bias", shape=[3])), "expected 12 bytes of 'bias'"),
    "wrong itemsize": (content(changed("bias", dtype="F64")), "expected 16 bytes of 'bias'"),
    "cut short": (content(HEADER, 31), "expected 32 bytes of tensors .*got 31"),
    "appended to": (content(HEADER, 33), "expected 32 bytes of tensors .*got 33"),
}


@pytest.mark.parametrize(("file", "message"), FILES.values(), ids=FILES)
def test_a_damaged_file_is_refused(file: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file)
    check_refused(tmp_path, ValueError, message)


def check_refused(path: Path, kind: type[Exception], message: str) -> None:
    for strict in (True, False):
        model = make()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(kind, match=message) as refusal:
            ss.load_safetensors(path, model, strict=strict)
        assert len(str(refusal.value)) < 600
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])


def write_sharded(folder: Path, weight_map: Any = None) -> None:
    files = {FIRST: "weight", SECOND: "bias"}
    for file, name in files.items():
        size = HEADER[name]["data_offsets"][1] - HEADER[name]["data_offsets"][0]
        entry = {**HEADER[name], "data_offsets": [0, size]}
        (folder / file).write_bytes(content({name: entry}, size))
    if weight_map is None:
        weight_map = {name: file for file, name in files.items()}
    index = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map})
    (folder / INDEX).write_bytes(index if isinstance(index, bytes) else index.encode())


def test_an_endless_limit_means_one_file(tmp_path: Path) -> None:
    ss.save_safetensors(tmp_path, make(), max_shard_bytes=float("inf"))
    assert os.listdir(tmp_path) == [SINGLE]


def both(weight: Any, bias: Any) -> dict[str, Any]:
    return {"weight": weight, "bias": bias}


INDEXES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "expected a JSON object as index"),
    "no object": (b"[]", "a JSON object as index"),
    "no weight_map": (b"{}", "weight_map, got None"),
    "weight_map a list": ([], "weight_map, got"),
    "name twice": (
        b'{"weight_map": {"weight": "a", "weight": "b"}}',
        "'weight' twice in one object",
    ),
    "file a number": (both(FIRST, 2), "own folder for 'bias', got 2"),
    "file in a folder": (both(FIRST, f"x/{SECOND}"), "own folder for 'bias'"),
    "file above": (both(FIRST, f"../{SECOND}"), "own folder for 'bias'"),
    "file absolute": (both(FIRST, "/dev/zero"), "own folder for 'bias'"),
    "file of two dots": (both(FIRST, ".."), "own folder for 'bias'"),
    "file with a zero byte": (both(FIRST, "a\0b"), "own folder for 'bias'"),
    "tensor in another file": (both(FIRST, FIRST), f"expected 'bias' in {FIRST}"),
    "files exchanged": (both(SECOND, FIRST), "expected 'weight' in"),
    "tensor in no file": ({**both(FIRST, SECOND), "more": FIRST}, "expected 'more' in"),
    "tensor not listed": ({"weight": FIRST, "more": SECOND}, "expected 'bias' in no file"),
}


@pytest.mark.parametrize(("weight_map", "message"), INDEXES.values(), ids=INDEXES)
def test_a_damaged_index_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, weight_map)
    check_refused(tmp_path, ValueError, message)


ODD = "\x1b[2Jmodel\nfirst.safetensors"
"""Would clear a terminal, and begin a line of its own."""


@pytest.mark.parametrize("exists", [False, True], ids=["missing", "with another tensor"])
def test_names_of_files_are_shown_with_escapes(exists: bool, tmp_path: Path) -> None:
    folder = tmp_path / "export\r"
    folder.mkdir()
    write_sharded(folder, both(ODD, SECOND))
    if exists:
        (folder / ODD).write_bytes((folder / SECOND).read_bytes())
    for place in (folder, folder / "a\tb"):
        with pytest.raises((ValueError, FileNotFoundError)) as refusal:
            ss.load_safetensors(place, make())
        assert str(refusal.value).isprintable()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def no_file(path: Path) -> None:
    pass


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


PLANTED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "a FIFO": (fifo, ValueError, "expected a file"),
    "a link to a device": (to_device, ValueError, "expected a file"),
    "a folder": (Path.mkdir, ValueError, "expected a file"),
    "nothing": (no_file, FileNotFoundError, "a folder without it"),
    "a link to nothing": (dangling, FileNotFoundError, "a folder without it"),
}


@pytest.mark.parametrize("name", [SINGLE, INDEX, SECOND])
@pytest.mark.parametrize(("plant", "kind", "message"), PLANTED.values(), ids=PLANTED)
def test_what_is_no_regular_file_is_refused_at_once(
    name: str,
    plant: Callable[[Path], None],
    kind: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    if name == SECOND:
        write_sharded(tmp_path)
        (tmp_path / name).unlink()
    plant(tmp_path / name)
    check_refused(tmp_path, kind, message)


@pytest.mark.parametrize("names", [[SINGLE], [FIRST, SECOND]], ids=["single", "sharded"])
def test_links_to_regular_files_are_followed_as_in_the_cache_of_the_hub(
    names: list[str], tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    snapshot.mkdir()
    blobs.mkdir()
    write_sharded(blobs)
    (blobs / SINGLE).write_bytes(content(HEADER))
    for number, name in enumerate([*names, INDEX] if len(names) > 1 else names):
        (blobs / name).rename(blobs / f"hash{number}")
        (snapshot / name).symlink_to(blobs / f"hash{number}")
    model = make()
    assert ss.load_safetensors(snapshot, model) == ([], [])
    assert model.weight.count_nonzero() == model.bias.count_nonzero() == 0
    assert ss.load_safetensors(snapshot / names[0], make(), strict=False).unexpected_keys == []
    if len(names) > 1:
        assert ss.load_safetensors(snapshot / INDEX, make()) == ([], [])


def fail_late(rank: int, world_size: int, folder: Path) -> str:
    model = make()
    ss.fully_shard(model, zero_dp_strategy=3)
    if rank == 1:
        failing = mock.Mock(side_effect=OSError(5, "Input/output error"))
        Source.read = failing  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the module is half loaded") as failure:
        ss.load_safetensors(folder, model)
    return str(failure.value)


def test_a_disk_that_fails_after_the_checks_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content(HEADER))
    first, second = run_on_ranks(fail_late, 2, tmp_path)
    assert first == f"rank 1: {second}"


def test_a_flipped_bit_in_a_header_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, dtype=torch.bfloat16))
    ss.save_safetensors(tmp_path, model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sound = (tmp_path / SINGLE).read_bytes()
    header_bytes = 8 + int.from_bytes(sound[:8], "little")
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        flipped = bytearray(sound)
        flipped[draw.randrange(header_bytes)] ^= 1 << draw.randrange(8)
        (tmp_path / SINGLE).write_bytes(flipped)
        for value in model.state_dict().values():
            value.zero_()
        try:
            ss.load_safetensors(tmp_path, model)
        except ValueError:
            refused += 1
            assert all(not value.any() for value in model.state_dict().values())
        else:
            state = model.state_dict()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert refused > 150


def test_a_flipped_bit_in_an_index_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    sound = (tmp_path / INDEX).read_bytes()
    draw = random.Random(0)
    for _ in range(100):
        flipped = bytearray(sound)
        flipped[draw.randrange(len(sound))] ^= 1 << draw.randrange(8)
        (tmp_path / INDEX).write_bytes(flipped)
        with contextlib.suppress(ValueError, FileNotFoundError):
            assert ss.load_safetensors(tmp_path, model := make()) == ([], [])
            assert not model.weight.any() and not model.bias.any()


def test_an_index_that_is_replaced_while_files_are_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sharded(tmp_path)

    def replaced(header: bytes, file_bytes: int) -> Any:
        (tmp_path / "new").write_bytes((tmp_path / INDEX).read_bytes())
        (tmp_path / "new").replace(tmp_path / INDEX)
        return parse_header(header, file_bytes)

    module = "sidestream.sharding.safetensors.files"
    monkeypatch.setattr(f"{module}.parse_header", replaced)
    check_refused(tmp_path, ValueError, "an index that was replaced")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def tied_content(**tensors: Tensor) -> bytes:
    kinds = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.float64: "F64"}
    header: dict[str, Any] = {}
    data = b""
    for name, value in tensors.items():
        raw = value.numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name.replace("_", ".")] = {
            "dtype": kinds[value.dtype],
            "shape": list(value.shape),
            "data_offsets": offsets,
        }
        data += raw
    return content(header, 0) + data


W, V, N = torch.ones(3, 3), torch.ones(3), torch.ones(2, dtype=torch.int64)
MISFITS: dict[str, tuple[dict[str, Tensor], list[str], list[str], list[str]]] = {
    "nothing there": (
        {},
        ["missing: count, a.weight, b.weight, b.bias"],
        ["count", "a.weight", "b.weight", "b.bias"],
        [],
    ),
    "missing and unexpected": (
        {"b_weight": W, "count": N, "more": V, "most": V},
        ["missing: b.bias", "unexpected: more, most"],
        ["b.bias"],
        ["more", "most"],
    ),
    "shapes": (
        {"a_weight": torch.ones(9), "b_bias": torch.ones(3, 1), "count": N},
        [r"shape of a.weight: expected \(3, 3\), got \(9,\)", "shape of b.bias: expected"],
        ["a.weight", "b.weight", "b.bias"],
        ["a.weight", "b.bias"],
    ),
    "a float for an integer": (
        {"a_weight": W, "b_bias": V, "count": torch.ones(2)},
        ["dtype of count: expected torch.int64, got torch.float32"],
        ["count"],
        ["count"],
    ),
    "an integer for a float": (
        {"a_weight": W, "b_bias": V.to(torch.int64), "count": N},
        ["dtype of b.bias: expected torch.float32, got torch.int64"],
        ["b.bias"],
        ["b.bias"],
    ),
}


@pytest.mark.parametrize(
    ("stored", "lines", "missing", "unexpected"), MISFITS.values(), ids=MISFITS
)
def test_all_that_does_not_fit_is_listed_and_strict_loads_none(
    stored: dict[str, Tensor],
    lines: list[str],
    missing: list[str],
    unexpected: list[str],
    tmp_path: Path,
) -> None:
    (tmp_path / SINGLE).write_bytes(tied_content(**stored))
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit the module, and nothing") as refusal:
        ss.load_safetensors(tmp_path, model)
    for line in lines:
        assert re.search(f"\n  {line}", str(refusal.value)), refusal.value
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    left_out = ss.load_safetensors(tmp_path, model, strict=False)
    assert left_out == (missing, unexpected)
    for name, value in model.state_dict().items():
        expected = before[name] if name in missing else torch.ones_like(value)
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_two_names_of_one_tensor_must_agree(strict: bool, tmp_path: Path) -> None:
    rest = {"b_bias": V, "count": N}
    (tmp_path / SINGLE).write_bytes(tied_content(a_weight=W, b_weight=W, **rest))
    assert ss.load_safetensors(tmp_path, Tied(), strict=strict) == ([], [])
    for other in (2 * W, W.double()):
        (tmp_path / SINGLE).write_bytes(tied_content(a_weight=W, b_weight=other, **rest))
        with pytest.raises(ValueError, match=r"equal values of 'a\.weight' and 'b\.weight'"):
            ss.load_safetensors(tmp_path, Tied(), strict=strict)


def test_narrower_integers_are_widened(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(tied_content(a_weight=W, b_bias=V, count=N.to(torch.int32)))
    ss.load_safetensors(tmp_path, model := Tied())
    assert torch.equal(model.count, N)


class WithNote(nn.Linear):
    def get_extra_state(self) -> object:
        return {"note": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_extra_state_is_named_and_not_left_out_in_silence(tmp_path: Path) -> None:
    model = nn.Sequential(WithNote(3, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"0\._extra_state: extra state, which is no tensor"):
        ss.save_safetensors(tmp_path / "export", model)
    assert not (tmp_path / "export").exists()
    (tmp_path / SINGLE).write_bytes(content(HEADER))
    with pytest.raises(ValueError, match=r"missing: _extra_state\n"):
        ss.load_safetensors(tmp_path, WithNote(3, 2))
    assert ss.load_safetensors(tmp_path, WithNote(3, 2), strict=False) == (["_extra_state"], [])


def on_meta() -> nn.Module:
    return nn.Linear(3, 2, device="meta")


def hooked() -> nn.Module:
    model = make()
    model.register_state_dict_post_hook(
        lambda module, state, prefix, local: state.update(weight=state["weight"] * 2)
    )
    return model


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def of_complex() -> nn.Module:
    model = make()
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    return model


UNSTORABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "on the meta device": (on_meta, "weight: a tensor on the meta device"),
    "made by a hook": (hooked, "weight: no parameter or buffer of the module"),
    "without values": (lazy, "weight: a parameter without values yet"),
    "complex": (of_complex, "dtype of 'phase': expected one that safetensors has"),
}


@pytest.mark.parametrize(("build", "message"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_the_format_cannot_hold_is_refused_by_name(
    build: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ss.save_safetensors(tmp_path / "export", build())
    assert not (tmp_path / "export").exists()
    (tmp_path / SINGLE).write_bytes(content(HEADER))
    with pytest.raises(ValueError, match="does not fit the module, and nothing was loaded"):
        ss.load_safetensors(tmp_path, build())


def test_an_expanded_buffer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = make()
    model.register_buffer("wide", torch.ones(1).expand(3))
    ss.save_safetensors(tmp_path, model)
    expected = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(ValueError, match="'wide', which is expanded"):
        ss.load_safetensors(tmp_path, model)
    assert torch.equal(model.weight, expected + 1)


def refuse_on_ranks(rank: int, world_size: int, folder: Path) -> list[str]:
    """Every case fails on one rank only; returns what this rank was told."""
    told = []
    for zero in (0, 3):
        model = nn.Linear(3, 2)
        ss.fully_shard(model, zero_dp_strategy=zero)
        before = ss.full_state_dict(model)
        own = folder / f"rank{rank}"
        cases: list[tuple[Path, dict[str, Any]]] = [
            (own if rank else folder / "sound", {}),  # rank 1: damaged
            (folder / "sound" if rank else folder / "other", {}),  # other contents, both sound
            (folder / "sound" if rank else folder / "trained", {}),  # the same header
            (folder / "sound", {"strict": rank == 0}),
            (folder / ("sound" if rank else "missing"), {}),
        ]
        for path, options in cases:
            with pytest.raises((ValueError, FileNotFoundError)) as refusal:
                ss.load_safetensors(path, model, **options)
            told.append(str(refusal.value))
        state = ss.full_state_dict(model)
        assert all(torch.equal(value, state[name]) for name, value in before.items())
    return told


def test_a_refusal_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    for name, file in {
        "sound": content(HEADER),
        "other": content({"__metadata__": {}, **HEADER}),
        "rank1": content(HEADER, 31),
        "trained": content(HEADER, 0) + bytes(31) + b"1",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / SINGLE).write_bytes(file)
    first, second = run_on_ranks(refuse_on_ranks, 2, tmp_path)
    texts = ["bytes of tensors", *2 * ["path: expected"], "strict: expected", "missing"]
    for told in (first, second):
        for text, expected in zip(told, 2 * texts, strict=True):
            assert expected in text
    assert first[0].startswith("rank 1: ") and second[4].startswith("rank 0: ")


def test_open_model_closes_what_it_opened_when_it_refuses(tmp_path: Path) -> None:
    write_sharded(tmp_path, both(SECOND, FIRST))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="expected 'weight' in"), contextlib.ExitStack() as files:
        open_model(tmp_path, files)
    assert len(os.listdir("/proc/self/fd")) == before


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "path a number": ({"path": 3}, TypeError, "path: expected text"),
    "path with a zero byte": ({"path": "a\0b"}, ValueError, "path: expected"),
    "module a function": ({"module": make}, TypeError, "module: expected a torch.nn.Module"),
    "module's class": ({"module": nn.Linear}, TypeError, "got the class Linear"),
}
BAD_SAVES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no bytes": ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes: expected"),
    "bytes in words": ({"max_shard_bytes": "5GB"}, TypeError, "max_shard_bytes: expected"),
    "endless": ({"max_shard_bytes": float("nan")}, ValueError, "max_shard_bytes: expected"),
    "dtype of integers": ({"dtype": torch.int8}, TypeError, "dtype: expected None or"),
    "dtype in words": ({"dtype": "bf16"}, TypeError, "dtype: expected None or"),
}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    (BAD_ARGUMENTS | BAD_SAVES).values(),
    ids=BAD_ARGUMENTS | BAD_SAVES,
)
def test_bad_arguments_are_refused(
    options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    given = {"path": tmp_path / "export", "module": make(), **options}
    with pytest.raises(kind, match=message):
        ss.save_safetensors(**given)
    if not options.keys() & {"max_shard_bytes", "dtype"}:
        with pytest.raises(kind, match=message):
            ss.load_safetensors(**given)
    with pytest.raises(TypeError, match="strict: expected"):
        ss.load_safetensors(tmp_path, make(), strict="no")  # type: ignore[arg-type]
    assert [*tmp_path.iterdir()] == []
