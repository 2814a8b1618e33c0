"""Ranks that read different tables of tuned launches are told so once, when a model is sharded."""

import json
import os
from pathlib import Path

import pytest
from torch import nn

import sidestream as ss
from sidestream.kernels import tuned
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.warned import warned

NAME, TRITON = "Test GPU", "3.6.0"


def write_table(folder: Path, block_bytes: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "table.json"
    entry = {"op": "pack_", "case": "bf16", "block_bytes": block_bytes, "num_warps": 8}
    document = {"schema_version": 1, "kind": "tuned", "device": NAME, "triton": TRITON}
    path.write_text(json.dumps({**document, "entries": [entry]}))
    return path


def _shard(rank: int, world_size: int, tables: list[str]) -> list[str]:
    """What was logged; the ranks' devices are taken for GPUs that may be tuned."""
    os.environ[tuned.VARIABLE] = tables[rank]
    os.environ["XDG_CONFIG_HOME"] = str(Path(tables[rank]).parent)
    tuned.device_name = lambda device: NAME
    tuned.triton_version = lambda: TRITON
    model = nn.Sequential(nn.Linear(4, 4))
    with warned() as messages:
        ss.fully_shard(model, fsdp_unit_modules=[nn.Linear])
    return messages


@pytest.mark.parametrize("differ", [True, False], ids=["different", "equal"])
def test_ranks_with_different_tables_are_told(tmp_path, differ):
    tables = [
        str(write_table(tmp_path / f"rank{rank}", 8192 << (rank if differ else 0)))
        for rank in range(2)
    ]
    first, second = run_on_ranks(_shard, 2, tables, timeout_s=60)
    assert second == []
    if not differ:
        assert first == []
        return
    (message,) = first
    assert "rank 0: " in message and "rank 1: " in message
    assert all(table in message for table in tables)
    assert "changes no result" in message
