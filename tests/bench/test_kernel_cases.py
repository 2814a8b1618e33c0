"""Every case of the kernel benchmark: bytes are the tensors', the gate is green and can be red."""

import sys
from dataclasses import replace

import pytest
import torch

from sidestream.bench.clocks import rotation_of
from sidestream.bench.kernel_cases.case import OURS, block_numel, block_shapes, made
from sidestream.bench.kernel_cases.selection import all_cases
from sidestream.kernels import registry

CPU = torch.device("cpu")
CASES = all_cases()
STANDARD = [case for case in CASES if case.standard]
NUMEL = 20_000
PLAIN_BLOCKS = [
    case for case in CASES if case.plain and case.op in ("quantize_mx_", "quantize_nvfp4_")
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
standard_case = pytest.mark.parametrize("case", STANDARD, ids=lambda case: case.name)

# What docs/kernels.md says that an op moves, in bytes an element, of large sizes.
BYTES_AN_ELEMENT = {
    "pack bf16 -> fp32": 2 + 4,
    "pack bf16 -> fp32 accumulate": 2 + 2 * 4,
    "unpack bf16 -> bf16": 2 + 2,
    "reduce world 8 bf16 -> fp32": (8 * 2 + 4) / 8,
    "reduce world 2 bf16 -> fp32 accumulate": (2 * 2 + 2 * 4) / 2,
    "cast bf16 -> e2m1": 2 + 0.5,
    "cast fp32 -> bf16 SR": 4 + 2,
    "cast_back e4m3 -> bf16": 1 + 2,
    "quantize_fp8 tensor bf16": 2 * 2 + 1,
    "quantize_fp8 1x128 bf16": 2 + 1 + 4 / 128,
    "quantize_fp8 128x128 bf16": 2 + 1 + 4 / 128**2,
    "quantize_fp8 delayed bf16": 2 + 1,
    "dequantize_fp8 row fp32": 1 + 4 / 4096 + 4,
    "update_fp8_scales of 16": 8,
    "quantize_mx e4m3 bf16": 2 + 1 + 1 / 32,
    "dequantize_mx e2m1 bf16": 0.5 + 1 / 32 + 2,
    "amax_nvfp4 bf16": 2,
    "quantize_nvfp4 bf16 hadamard": 2 + 0.5 + 1 / 16,
    "dequantize_nvfp4 fp32": 0.5 + 1 / 16 + 4,
    "hadamard16 fp16": 2 + 2,
    "pack_message bf16 -> mxfp4": 2 + 0.5 + 1 / 32,
    "unpack_message nvfp4 -> fp32": 0.5 + 1 / 16 + 4 / 1024 + 4,
    "reduce_messages world 8 mxfp8": (8 * (1 + 1 / 32) + 4) / 8,
    "adamw bf16 -> bf16": 24 + 2 + 2,
    "adamw fp32 -> none": 24 + 4,
    "sgd momentum bf16 -> bf16": 16 + 2 + 2,
    "l2_norm bf16": 2,
}


def test_names_tell_cases_apart_and_every_op_has_a_standard_case():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.op for case in STANDARD} == {row.op for row in registry.ROWS}


@every_case
@pytest.mark.parametrize("numel", [1, NUMEL])
def test_bytes_are_those_of_the_tensors(case, numel):
    operands = case.operands(CPU, numel)
    assert case.num_bytes(numel) == operands.num_bytes(case.passes)


@every_case
def test_rotated_operands_lie_in_twice_the_cache(case):
    cache_bytes = 256 * 1024
    rotation = rotation_of(case.operands(CPU, NUMEL), cache_bytes)
    memories = {
        tensor.data_ptr(): tensor.nbytes
        for one in rotation
        for tensor in (*one.read, *one.written, *one.updated, *one.scalars)
    }
    assert sum(memories.values()) >= 2 * cache_bytes


def test_bytes_are_what_the_registry_says():
    cases = {case.name: case for case in CASES}
    for name, expected in BYTES_AN_ELEMENT.items():
        numel = 2**24
        found = cases[name].num_bytes(numel) / cases[name].numel(numel)
        assert found == pytest.approx(expected, rel=1e-3), name


@every_case
def test_gate_is_green(case):
    assert case.agrees(CPU, NUMEL)


@standard_case
def test_one_wrong_bit_makes_the_gate_red(case):
    def spoilt(operands):
        call = case.ours(operands)

        def run():
            found = made(call(), operands)
            found[-1].view(-1).view(torch.uint8)[-1] ^= 1
            return tuple(found)

        return run

    assert not replace(case, ours=spoilt).agrees(CPU, 1)


@standard_case
def test_rivals_run_again_and_again(case):
    operands = case.operands(CPU, NUMEL)
    for name, bind in case.rivals.items():
        try:
            run = bind(operands)
        except ImportError:
            assert "TransformerEngine" in name or "torchao" in name
        else:
            run()
            run()


@standard_case
def test_plain_pytorch_needs_no_other_package(case, monkeypatch):
    """One that imports such a package raises."""
    for package in ("torchao", "transformer_engine"):
        monkeypatch.setitem(sys.modules, package, None)
    if case.plain is not None:
        case.plain(case.operands(CPU, NUMEL))()


@pytest.mark.parametrize("case", PLAIN_BLOCKS, ids=lambda case: case.name)
def test_plain_pytorch_quantizes_blocks_as_they_are_defined(case):
    """NVFP4's factor is rounded elsewhere, so that here and there a tie goes the other way."""
    found, expected = case.operands(CPU, NUMEL), case.operands(CPU, NUMEL)
    case.plain(found)()
    case.definition(expected)
    (data, scales), (defined_data, defined_scales) = (
        [tensor.view(torch.uint8) for tensor in one.written] for one in (found, expected)
    )
    assert torch.equal(scales, defined_scales)
    assert (data != defined_data).float().mean() <= (0.01 if "nvfp4" in case.name else 0.0)


def test_a_rival_that_does_more_than_ours_says_so():
    rivals = {name for case in CASES if case.op == "l2_norm_" for name in case.rivals}
    assert rivals == {"_foreach_norm", "clip_grad_norm_, scales"}


@pytest.mark.parametrize("name", ["torch.cat", "_foreach_copy_", "_chunk_cat"])
def test_rivals_of_pack_make_the_same_numbers(name):
    """They are bound to other memory than ours, so what they leave there is looked for."""
    (case,) = [case for case in CASES if case.name == "pack bf16 -> fp32"]
    operands = case.operands(CPU, NUMEL)
    returned = case.rivals[name](operands)()
    found = operands.written if name == "_foreach_copy_" else [returned]
    packed = torch.cat([tensor.reshape(-1) for tensor in found])
    assert torch.equal(packed, torch.cat([one.reshape(-1).float() for one in operands.read]))


def test_the_same_operands_come_at_every_call_and_nobody_s_numbers_change():
    case = STANDARD[0]
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    one, two = case.operands(CPU, NUMEL), case.operands(CPU, NUMEL)
    assert torch.equal(torch.randn(3), expected)
    assert all(map(torch.equal, one.read, two.read))


def test_copies_share_no_memory():
    operands = STANDARD[0].operands(CPU, NUMEL)
    copy = operands.copied()
    assert all(map(torch.equal, copy.read, operands.read))
    assert {one.data_ptr() for one in copy.read}.isdisjoint(one.data_ptr() for one in operands.read)


@pytest.mark.parametrize("numel", [100_000, 1_000_000, 218_112_000])
def test_a_block_has_about_as_many_elements(numel):
    assert block_numel(numel) == pytest.approx(numel, rel=0.1)
    assert block_shapes(218_112_000)[0] == (4096, 4096)


def test_ours_comes_first():
    assert all(next(iter(case.candidates)) == OURS for case in CASES)
