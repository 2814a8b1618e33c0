"""Checkpoints in an S3-compatible server, which the tests start: moto's, on 127.0.0.1."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sidestream as ss
from sidestream.sharding import storage
from sidestream.sharding.storage import location_of
from sidestream.sharding.storage.drivers import forget_drivers
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.s3 import BUCKET, Server, serving

pytest.importorskip("s3fs")
pytest.importorskip("moto")

URL = f"s3://{BUCKET}/run"
WIDTH = 600  # 1.4 MiB a weight: ranges are what counts, not what lies around them


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with serving() as server:
        yield server


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    ss.fully_shard(model)
    return model


def saves_loads_and_dies(rank: int, world_size: int, url: str) -> list[tuple[Any, bool, float]]:
    saved, loaded = make(0), make(1)
    ss.save_checkpoint(url, saved, extra=f"old {rank}")
    ss.save_checkpoint(url, saved, extra=f"new {rank}", asynchronous=True).result()
    driver = type(location_of(url).driver)
    cat_file, counted = driver._cat_file, [0]  # what all reading comes to, fsspec says

    async def counting(self: Any, *args: Any, **kwargs: Any) -> bytes:
        found: bytes = await cat_file(self, *args, **kwargs)
        counted[0] += len(found)
        return found

    with mock.patch.object(driver, "_cat_file", counting):
        extra = ss.load_checkpoint(url, loaded)
    whole = [ss.full_state_dict(model) for model in (saved, loaded)]
    is_same = all(torch.equal(whole[0][name], whole[1][name]) for name in whole[0])
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, (extra, is_same, counted[0]))
    dying = mock.patch("sidestream.sharding.checkpoint.save.write_manifest", lambda *_: os._exit(9))
    with dying, pytest.raises(RuntimeError):  # on the ranks that are left
        ss.save_checkpoint(url, loaded, extra="newest")
    return results


def test_ranks_replace_load_what_each_needs_and_die(s3: Server) -> None:
    """The last save ends between the data and the manifest, where one rank is killed."""
    world_size = 2
    with pytest.raises(RanksFailed, match="exit") as caught:
        run_on_ranks(saves_loads_and_dies, world_size, f"{URL}/a", timeout_s=40)
    assert [*caught.value.failures] == [0]
    results = caught.value.values[1]
    assert [result[:2] for result in results] == [("new 0", True), ("new 1", True)]

    names = s3.names("run/a")
    kinds = [name[24:] for name in names if name.endswith("distcp")]
    assert sorted(kinds) == ["__0_0.distcp", "__0_0.distcp", "__1_0.distcp", "__1_0.distcp"]
    total = sum(s3.files.info(f"{BUCKET}/run/a/{name}")["size"] for name in names) / 2
    # A share of the sums, a share of the elements, and the blocks in which they begin and end.
    for _, _, num_bytes in results:
        assert 0.9 * total < num_bytes < 1.2 * total

    alone = make(2)
    assert ss.load_checkpoint(f"{URL}/a", alone) == "new 0"
    ss.save_checkpoint(f"{URL}/a", alone, extra="newest")
    assert ss.load_checkpoint(f"{URL}/a", alone) == "newest"
    assert [name[24:] for name in s3.names("run/a")[1:]] == ["__0_0.distcp", ""]


def test_damage_and_removal(s3: Server) -> None:
    model = nn.Linear(20, 20)
    for name in ["9", "10", "11"]:
        ss.save_checkpoint(f"{URL}/kept/{name}", model)
    assert [str(url) for url in ss.remove_old_checkpoints(f"{URL}/kept", keep=2)] == [
        f"{URL}/kept/9"
    ]
    names = s3.names("run/kept")
    assert {name.split("/")[0] for name in names} == {"10", "11"}
    data = next(name for name in names if name.startswith("11/") and name.endswith(".distcp"))
    content = bytearray(s3.files.cat_file(f"{BUCKET}/run/kept/{data}"))
    content[len(content) // 2] ^= 1
    s3.files.pipe_file(f"{BUCKET}/run/kept/{data}", bytes(content))
    with pytest.raises(ValueError, match="damaged file or one of another checkpoint"):
        ss.load_checkpoint(f"{URL}/kept/11", model)
    ss.load_checkpoint(f"{URL}/kept/10", model)


def test_an_upload_that_fails_is_ended(s3: Server) -> None:
    url = location_of(f"{URL}/half/a")
    with pytest.raises(ZeroDivisionError), storage.create_file(url) as file:
        for _ in range(7):
            file.write(memoryview(bytes(8 << 20)))  # more than a part, which is then sent
        raise ZeroDivisionError
    assert s3.names("run/half") == []
    assert s3.files.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", []) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", ["no bucket", "no credentials", "no server"])
def test_what_does_not_answer_is_told_in_a_sentence(
    s3: Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, url = nn.Linear(2, 2), f"{URL}/c"
    if fault == "no bucket":
        with pytest.raises(
            OSError, match=r"s3://absent/c, where it cannot .*bucket does not exist"
        ):
            ss.save_checkpoint("s3://absent/c", model)
    elif fault == "no credentials":
        with s3.refusing_everybody(), pytest.raises(OSError, match=f"got {url}, where it cannot"):
            ss.save_checkpoint(url, model)
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the default, 5, takes 7 s
        forget_drivers()
        with pytest.raises(OSError, match=f"{url}/sidestream.json: Could not connect"):
            ss.load_checkpoint(url, model)
        forget_drivers()
