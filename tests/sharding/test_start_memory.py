"""No rank holds the whole model while it starts from the meta device or from rank 0."""

from pathlib import Path

import pytest

from sidestream.tests.sharding import start_memory

# What a shard of 2 ranks and the largest tensor take is 58 %; the rest is for malloc.
LIMITS = {
    "every rank makes the model": 1.35,
    "meta device but on rank 0, which makes the model": 1.35,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    start_memory.write_files(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("way", start_memory.WAYS)
def test_peak_above_the_start(way: str, folder: Path) -> None:
    on_rank_0, elsewhere = start_memory.peaks(way, 2, folder)
    limit = LIMITS.get(way, 0.75)
    assert 0.4 < on_rank_0 < limit, "more than staging beside the shards"
    assert 0.4 < elsewhere < (limit if way == "every rank makes the model" else 0.70)
