"""Compiles the kernels for six GPUs, none of which need be here, and holds the compiler to a gate.

On NVIDIA every access in the full-tile path is 16 bytes wide or wider, nothing spills, and no
32-bit product counts elements; registers are as `registry` allows. Controls show the gate to fail.
"""

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from sidestream.kernels import launch, registry
from sidestream.kernels.ahead import compile as aot
from sidestream.kernels.ahead import many_tensors
from sidestream.kernels.ahead.many_tensors import PACK, REDUCE
from sidestream.kernels.pack import kernel as pack
from sidestream.kernels.pack import sum as reduce
from sidestream.tests.kernels import costs

ACCESS_BITS = 128
NVIDIA = [target for target in aot.TARGETS if target.startswith("sm_")]


def compile_pack(target, flat, *, unpack, accumulate, module=pack):
    configuration = many_tensors.pack_configuration(
        flat, unpack=unpack, accumulate=accumulate, module=module
    )
    return costs.compile_for(configuration, target)


def compile_reduce(target, parts, out, world, *, accumulate, module=reduce):
    configuration = many_tensors.reduce_configuration(
        parts, out, world, accumulate=accumulate, module=module
    )
    return costs.compile_for(configuration, target)


def full_tile_functions(module):
    if hasattr(module, "_move_full_tile"):
        return many_tensors.pack_functions(module)
    return many_tensors.reduce_functions(module)


def faults(compiled, module):
    """What is wrong with accesses, products and spills, as a list of sentences."""
    accesses = compiled.accesses_of(*full_tile_functions(module))
    found = [
        f"{'load' if access.is_load else 'store'} of {access.bits} bits at line {access.line}"
        for access in accesses
        if access.bits < ACCESS_BITS
    ]
    if {access.is_load for access in accesses} != {True, False}:
        found.append("no load or no store in the full-tile path: the gate sees nothing")
    if compiled.spill_bytes:
        found.append(f"{compiled.spill_bytes} bytes spilled")
    narrow = re.findall(r"arith\.muli [^\n]*: i32", compiled.intermediate)
    found += [f"32-bit product: {text}" for text in narrow]
    return found


def compiled_ahead():
    packs = [
        partial(compile_pack, "sm_90", flat, unpack=unpack, accumulate=accumulate)
        for unpack in (False, True)
        for flat, accumulate in PACK
    ]
    calls = packs + [partial(compile_reduce, "sm_90", *case, accumulate=True) for case in REDUCE]
    for target in NVIDIA:
        calls.append(partial(compile_pack, target, "*fp32", unpack=False, accumulate=True))
        calls.append(partial(compile_reduce, target, "*bf16", "*fp32", 8, accumulate=True))
    return calls


@pytest.mark.parametrize(("flat", "accumulate"), PACK)
@pytest.mark.parametrize("unpack", [False, True], ids=["pack", "unpack"])
def test_pack_on_hopper(flat, unpack, accumulate):
    compiled = compile_pack("sm_90", flat, unpack=unpack, accumulate=accumulate)
    assert faults(compiled, pack) == []
    case = flat[1:] + (" accumulate" if accumulate else "")
    assert costs.measure("unpack_" if unpack else "pack_", case, compiled) == []


@pytest.mark.parametrize(("parts", "out", "world"), REDUCE)
def test_reduce_on_hopper(parts, out, world):
    compiled = compile_reduce("sm_90", parts, out, world, accumulate=True)
    assert faults(compiled, reduce) == []
    assert costs.measure("reduce_", f"{parts[1:]} -> {out[1:]} world {world}", compiled) == []


@pytest.mark.parametrize("target", [target for target in NVIDIA if target != "sm_90"])
def test_other_nvidia_targets(target):
    for compiled, module in (
        (compile_pack(target, "*fp32", unpack=False, accumulate=True), pack),
        (compile_reduce(target, "*bf16", "*fp32", 8, accumulate=True), reduce),
    ):
        assert faults(compiled, module) == []
        assert compiled.registers <= 48


@pytest.mark.parametrize(("flat", "accumulate"), PACK)
@pytest.mark.parametrize("unpack", [False, True], ids=["pack", "unpack"])
def test_full_tiles_are_wide_on_amd(flat, unpack, accumulate):
    """A thread has four elements of an FP32 tensor: 8 bytes of a half-precision buffer."""
    compiled = compile_pack("gfx942", flat, unpack=unpack, accumulate=accumulate)
    accesses = compiled.accesses_of(*full_tile_functions(pack))
    assert {access.bits for access in accesses} <= {64, ACCESS_BITS}
    assert {access.is_load for access in accesses if access.bits == ACCESS_BITS} == {True, False}


def test_full_blocks_are_wide_on_amd():
    """A thread has four elements of a row there: 8 bytes of BF16, 16 of the FP32 result."""
    compiled = compile_reduce("gfx942", "*bf16", "*fp32", 8, accumulate=True)
    loads, stores = costs.widths(compiled, *full_tile_functions(reduce))
    assert loads == {64, ACCESS_BITS}
    assert stores == {ACCESS_BITS}


def test_amd_compiles_without_spills():
    for compiled in (
        compile_pack("gfx942", "*bf16", unpack=False, accumulate=True),
        compile_reduce("gfx942", "*bf16", "*fp32", 8, accumulate=True),
    ):
        assert compiled.spill_bytes == 0
        assert 0 < compiled.registers <= 64
        assert compiled.accesses


def _without_hints(module, tmp_path):
    """`module` again, with the alignment hints taken out of its source."""
    source = Path(module.__file__).read_text()
    changed = re.sub(r"tl\.multiple_of\((.*), 16\)", r"(\1)", source)
    assert changed != source
    name = f"{module.__name__}_without_hints"
    file = tmp_path / f"{name.rpartition('.')[2]}.py"
    file.write_text(changed)
    spec = importlib.util.spec_from_file_location(name, file)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def test_gate_fails_without_the_hints(tmp_path):
    unhinted = _without_hints(pack, tmp_path)
    compiled = compile_pack("sm_90", "*bf16", unpack=False, accumulate=False, module=unhinted)
    found = faults(compiled, unhinted)
    assert any("load of 16 bits" in fault or "load of 32 bits" in fault for fault in found), found
    assert any("store of 16 bits" in fault for fault in found), found
    unhinted = _without_hints(reduce, tmp_path)
    compiled = compile_reduce("sm_90", "*bf16", "*fp32", 8, accumulate=True, module=unhinted)
    found = faults(compiled, unhinted)
    # Triton 3.8 makes vector loads of rows without the hints, but not vector stores.
    assert any("of 16 bits" in fault or "store of 32 bits" in fault for fault in found), found


def test_gate_fails_on_registers_spills_and_blindness(monkeypatch):
    monkeypatch.setattr(costs, "_table", {})
    compiled = compile_pack("sm_90", "*bf16", unpack=False, accumulate=False)
    assert any("sees nothing" in fault for fault in faults(compiled, reduce))
    monkeypatch.setattr(registry, "gate", lambda op, case: registry.Gate(case, None, 8))
    assert any("registers, allowed 8" in fault for fault in costs.measure("", "", compiled))
    monkeypatch.setattr(registry, "gate", lambda op, case: registry.Gate(case, 5.0, 255))
    found = costs.measure("", "", compiled, 5.01)
    assert found == ["5.01 instructions an element, allowed 5.0"]
    assert "FAILED" in costs.table_lines()[1]


def test_spills_are_read(monkeypatch):
    """256 sums a thread cannot stay in 255 registers."""
    crowded = launch.LaunchConfig(block_bytes=16 * 1024, num_warps=1)
    monkeypatch.setattr(reduce, "default_config", lambda world: crowded)
    compiled = compile_reduce("sm_90", "*bf16", "*fp32", 2, accumulate=True)
    assert compiled.spill_bytes > 0
    assert any("bytes spilled" in fault for fault in faults(compiled, reduce))


def test_unknown_target_is_refused():
    with pytest.raises(ValueError, match=r"target: expected one of sm_80, .*got 'sm_75'"):
        compile_pack("sm_75", "*bf16", unpack=False, accumulate=False)
