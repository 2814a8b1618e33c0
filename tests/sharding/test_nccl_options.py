"""Options of NCCL by group: from a mapping and from YAML, what is refused, what torch gets."""

import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sidestream.sharding.nccl_options import nccl_options, torch_options

YAML = """
dp_cp:
  min_ctas: 1
  max_ctas: 16
  net_name: IB
expt_dp:
  cga_cluster_size: 2
tp:
  is_high_priority_stream: true
"""
MAPPING = {
    "dp_cp": {"min_ctas": 1, "max_ctas": 16, "net_name": "IB"},
    "expt_dp": {"cga_cluster_size": 2},
    "tp": {"is_high_priority_stream": True},
}


def test_file_and_mapping(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "nccl.yaml"
    path.write_text(YAML)
    assert nccl_options(path) == nccl_options(str(path)) == nccl_options(MAPPING) == MAPPING
    path.write_text("")
    assert nccl_options(path) == nccl_options(None) == {}
    with pytest.raises(FileNotFoundError):
        nccl_options(tmp_path / "none.yaml")


def test_without_pyyaml(tmp_path: Path) -> None:
    with (
        mock.patch.dict(sys.modules, yaml=None),
        pytest.raises(ModuleNotFoundError, match=r"expected PyYAML to read .*pip install pyyaml"),
    ):
        nccl_options(tmp_path / "nccl.yaml")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"data": {}}, "data: expected one of the groups ['tp', 'pp'"),
        (
            {"tp": {"ctas": 1, "min_ctas": 0}, "pp": {"net_name": "tcp"}, "data": {}},
            "nccl_communicator_config_path: tp.ctas: expected one of ['min_ctas', 'max_ctas', "
            "'cga_cluster_size', 'net_name', 'is_high_priority_stream'], got 1; tp.min_ctas: "
            "expected a count of thread blocks, got 0; pp.net_name: expected 'IB' or 'socket', "
            "got 'tcp'; data: expected one of the groups",
        ),
        ({"tp": {"cga_cluster_size": 9}}, "tp.cga_cluster_size: expected 0 to 8, got 9"),
        ({"tp": {"is_high_priority_stream": 1}}, "expected True or False, got 1"),
        ({"tp": ["min_ctas"]}, "tp: expected a mapping of options to values, got ['min_ctas']; "),
        ([1], "expected a mapping of groups to options, got [1]"),
        ([], "expected a mapping of groups to options, got []"),
    ],
    ids=["group", "all of them", "cluster", "flag", "list of options", "list of groups", "empty"],
)
def test_refused(source: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        nccl_options(source)
    assert text in str(caught.value)


class _Options:
    """What torch.distributed.ProcessGroupNCCL.Options is, where torch was built without NCCL."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = types.SimpleNamespace(min_ctas=None, max_ctas=None, net_name=None)


def test_what_torch_gets() -> None:
    assert torch_options({}, "gloo") is torch_options({}, "nccl") is None
    with pytest.raises(ValueError, match="expected a job over nccl, got gloo"):
        torch_options({"min_ctas": 1}, "gloo")
    stand_in = types.SimpleNamespace(Options=_Options)
    with mock.patch.object(dist, "ProcessGroupNCCL", stand_in, create=True):
        made = torch_options({"max_ctas": 4, "is_high_priority_stream": True}, "nccl")
    assert made.is_high_priority_stream and vars(made.config) == {
        "min_ctas": None,
        "max_ctas": 4,
        "net_name": None,
    }


@pytest.mark.gpu
def test_what_torch_has() -> None:
    options = {"min_ctas": 1, "max_ctas": 4, "cga_cluster_size": 1, "net_name": "socket"}
    made = torch_options({**options, "is_high_priority_stream": True}, "nccl")
    assert made.is_high_priority_stream
    assert {name: getattr(made.config, name) for name in options} == options
