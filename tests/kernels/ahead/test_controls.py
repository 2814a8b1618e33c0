"""The gates fail when they should: on narrow accesses, spills, registers, and on what they miss."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from sidestream.kernels import LaunchConfig, paths
from sidestream.kernels.ahead import measure
from sidestream.kernels.ahead.compile import compile_launch
from sidestream.kernels.ahead.count import CountError, full_path
from sidestream.kernels.case import Gate, Operands
from sidestream.kernels.cases import case_of
from sidestream.kernels.pack import kernel as pack

MEASURED = measure.Measured(
    registers=32,
    spill_bytes=0,
    shared_bytes=0,
    num_warps=4,
    waves=None,
    load_bits=(128,),
    store_bits=(128,),
    wide_bytes=4.0,
    instructions=3.0,
    integers=1.0,
)
UNCOUNTED = {"instructions": None}


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "gate", "expected"),
    [
        ({}, Gate(3.0, 32), []),
        ({}, Gate(None, 31), ["registers: expected at most 31, got 32"]),
        ({}, Gate(2.9, 32), ["instructions an element: expected at most 2.9, got 3"]),
        ({"spill_bytes": 8}, Gate(3.0), ["bytes spilled: expected at most 0, got 8"]),
        (UNCOUNTED, Gate(3.0), ["instructions an element: expected a count, got none"]),
        (UNCOUNTED, Gate(None), []),
    ],
    ids=["within", "registers", "instructions", "spills", "uncounted", "not to be counted"],
)
def test_what_exceeds_a_gate_is_told(changed, gate, expected):
    assert dataclasses.replace(MEASURED, **changed).faults(gate) == expected


def test_memory_that_begins_anywhere_has_no_path_of_full_tiles():
    case = case_of("cast_", "e4m3 from bf16")

    def late(device, numel):
        made = case.make(device, numel)
        memory = torch.empty(made.read[0].numel() + 1, dtype=torch.bfloat16)
        return Operands(read=[memory[1:].view_as(made.read[0])], written=made.written)

    found = measure.measure(dataclasses.replace(case, make=late), "sm_90")
    assert found.instructions is None
    assert 128 not in found.load_bits
    assert found.faults(case.gate) != []


def loaded_again(module, pattern, replacement, folder):
    """The module under another name, with its source changed."""
    changed = re.sub(pattern, replacement, source := Path(module.__file__).read_text())
    assert changed != source
    name = f"{module.__name__}_without_hints"
    file = folder / f"{name}.py"
    file.write_text(changed)
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def test_accesses_are_narrow_without_the_hints(tmp_path):
    """The module of paths again, with the alignment hints taken out, and the kernel's with it."""
    loaded_again(paths, r"tl\.multiple_of\((.*), 16\)", r"(\1)", tmp_path)
    module = loaded_again(pack, r"\.\.paths", "..paths_without_hints", tmp_path)
    case = case_of("pack_", "bf16 to bf16")
    (launch,) = case.launches()
    thread_bytes = case.elements_per_thread(launch) * case.moved_bytes
    hinted = compile_launch(launch, "sm_90")
    assert full_path(hinted.instructions, thread_bytes).accesses
    narrow = compile_launch(dataclasses.replace(launch, kernel=module._pack_kernel), "sm_90")
    with pytest.raises(CountError, match="accesses of 16 bytes, got none"):
        full_path(narrow.instructions, thread_bytes)


def test_spills_are_read():
    """So many sums cannot stay in the registers of a thread."""
    case = case_of("reduce_", "bf16 to fp32 world 2 scaled accumulate")
    found = measure.measure(case, "sm_90", LaunchConfig(block_bytes=16 * 1024, num_warps=1))
    assert found.spill_bytes > 0
    assert any("bytes spilled" in fault for fault in found.faults(case.gate))


def test_unknown_targets_are_refused():
    (launch,) = case_of("pack_", "bf16 to bf16").launches()
    with pytest.raises(ValueError, match=r"target: expected one of sm_80, .*got 'sm_75'"):
        compile_launch(launch, "sm_75")
