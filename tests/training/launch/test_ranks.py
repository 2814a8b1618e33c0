import os
import threading

import pytest
import torch

from sidestream.training.errors import OptionsError
from sidestream.training.launch import ranks
from sidestream.training.launch.ranks import (
    DeviceChoice,
    Place,
    choose_device,
    default_num_ranks,
    follow_agent,
    joined_group,
    place_from,
)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_no_launcher_no_place():
    assert place_from({"WORLD_SIZE": "2"}) is None


def test_place_from_torchrun():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert place_from(environ) == Place(5, 8, 1, 4, "env://")


def test_place_from_our_launcher():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    environ[ranks.INIT_METHOD_VARIABLE] = "file:///x"
    assert place_from(environ) == Place(1, 2, 1, 2, "file:///x")


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "1"},
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
    ],
    ids=str,
)
def test_half_a_place_is_refused(environ):
    with pytest.raises(OptionsError, match="as torchrun sets them"):
        place_from(environ)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_used_and_not_shared():
    assert choose_device("auto", 2).kind == choose_device("cuda", 1).kind == "cuda"
    assert choose_device("cpu", 9).kind == "cpu"
    assert default_num_ranks("auto") == 2
    assert default_num_ranks("cpu") == 1
    with pytest.raises(
        OptionsError, match="got 3 ranks for 2 GPUs; pass --nproc 2 or --device cpu"
    ):
        choose_device("auto", 3)


@pytest.mark.usefixtures("no_gpu")
def test_cpu_is_used_where_there_is_no_gpu():
    assert choose_device("auto", 4).backend == "gloo"
    assert default_num_ranks("auto") == 1
    with pytest.raises(OptionsError, match="pass --device cpu"):
        choose_device("cuda", 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "64"),
        ({"TORCH_FR_BUFFER_SIZE": "500"}, "500"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}, None),
    ],
    ids=["ours", "the user's", "the user's, by its old name"],
)
def test_a_gloo_group_keeps_a_short_flight_record(monkeypatch, tmp_path, before, after):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")  # so that what the test leaves behind is undone
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    place = Place(init_method=f"file://{tmp_path}/meet")
    with joined_group(place, DeviceChoice("cpu", "gloo", "")):
        assert os.environ.get("TORCH_FR_BUFFER_SIZE") == after


def test_a_rank_is_told_once_its_agent_is_gone(monkeypatch):
    agent, told = [41], threading.Event()
    monkeypatch.setattr(ranks, "AGENT_POLL_S", 0.01)
    monkeypatch.setattr(os, "getppid", lambda: agent[0])
    follow_agent(told.set)
    assert not told.wait(0.2)
    agent[0] = 1
    assert told.wait(5)
