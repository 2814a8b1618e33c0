"""msc:// URLs, which multi-storage-client resolves by its profiles."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.storage import entries_of, location_of


@pytest.mark.slow
def test_a_profile_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("multistorageclient")
    provider = {"type": "file", "options": {"base_path": str(tmp_path / "base")}}
    config = tmp_path / "msc.json"
    config.write_text(json.dumps({"profiles": {"here": {"storage_provider": provider}}}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    (tmp_path / "base").mkdir()
    saved, loaded = nn.Linear(4, 4), nn.Linear(4, 4)
    for number in range(2):
        ss.save_checkpoint("msc://here/run/a", saved, extra=number)
        assert ss.load_checkpoint("msc://here/run/a", loaded) == number
    assert torch.equal(saved.weight, loaded.weight)
    assert len(entries_of(location_of("msc://here/run/a"))) == 3
    ss.save_checkpoint("msc://here/run/b", saved, asynchronous=True).result()
    assert [str(url) for url in ss.remove_old_checkpoints("msc://here/run", keep=1)] == [
        "msc://here/run/a"
    ]
    with pytest.raises(FileNotFoundError, match="expected a checkpoint at msc://here/run/a"):
        ss.load_checkpoint("msc://here/run/a", loaded)
    ss.load_checkpoint("msc://here/run/b", loaded)
    with pytest.raises(OSError, match=r"msc://there/a.*Profile"):
        ss.save_checkpoint("msc://there/a", saved)
