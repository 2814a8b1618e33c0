import hashlib
import json
import struct
from dataclasses import asdict

import torch

from sidestream.tests.training.processes import parse_result
from sidestream.training.result import RunResult, peak_memory_mib, sha256_of

RESULT = RunResult(
    loss_first=5.5,
    loss_last=2.25,
    loss_held_out=2.5,
    tokens_per_s=1000.0,
    step_ms_median=10.0,
    peak_mib=300.0,
    reserved_mib=None,
    params_sha256="00ff",
    world=2,
    zero=3,
    seed=0,
    steps=10,
    first_step=1,
    compute="fp32",
    grad_wire="bf16",
    param_wire=None,
    model="tiny",
    num_parameters=123,
    device="cpu",
    wire_bytes_per_step=456,
    torch="2.13.0",
    triton="3.6.0",
)


def test_line_is_read_back():
    assert parse_result(f"data: ...\n{RESULT.line()}\n") == asdict(RESULT)


def test_file_holds_the_same_figures(tmp_path):
    path = tmp_path / "result.json"
    RESULT.write(str(path))
    assert json.loads(path.read_text()) == asdict(RESULT)


def test_fingerprint_is_of_the_fp32_values_by_name():
    tensors = {
        "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
        "a": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
    }
    expected = hashlib.sha256(struct.pack("<5f", 0.5, 1.0, 3.0, 2.0, 4.0)).hexdigest()
    assert sha256_of(tensors) == expected


def test_peak_memory_grows_with_what_is_held():
    device = torch.device("cpu")
    before = peak_memory_mib(device)
    held = torch.ones(int(before) + 64, 1 << 18)  # MiB of it
    assert peak_memory_mib(device) > before + 32
    assert held.numel()
