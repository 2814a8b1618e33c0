"""What the benchmark adds to the kernels' cases: a gate of parts that can be red, and rivals."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from sidestream.bench.clocks import rotation_of
from sidestream.bench.kernel_cases import packages, parts
from sidestream.bench.kernel_cases.candidates import candidates_of
from sidestream.bench.kernel_cases.plain import plain_of
from sidestream.bench.kernel_cases.rivals import rivals_of
from sidestream.kernels import message_layout
from sidestream.kernels.cases import cases

CPU = torch.device("cpu")
STANDARD = [case for case in cases() if case.standard]
BY_NAME = {case.full_name: case for case in cases()}
NUMEL = 20_000
# A hundred rows, of which a part is one; of 128 x 128 blocks there must be two.
ROWS_NUMEL, SQUARES_NUMEL = 100 * 4096, 2 * 128 * 4096
CUT = [
    "pack bf16 to fp32",
    "pack bf16 to fp32 accumulate",
    "unpack bf16 to bf16",
    "reduce bf16 to fp32 world 2 accumulate",
    "cast e4m3 from bf16",
    "cast bf16 from fp32 stochastic",
    "cast_back e4m3 to bf16",
    "quantize_fp8 tensor from bf16",
    "quantize_fp8 delayed from bf16",
    "quantize_fp8 128x128 from bf16",
    "dequantize_fp8 tensor to bf16",
    "quantize_mx e2m1 from bf16",
    "dequantize_mx e2m1 to bf16",
    "update_fp8_scales max of 16",
    "quantize_nvfp4 from bf16 stochastic",
    "amax_nvfp4 of bf16",
    "dequantize_nvfp4 to bf16",
    "hadamard16 of bf16",
    "pack_message mxfp8 from bf16 stochastic",
    "pack_message nvfp4 from bf16",
    "unpack_message mxfp8 to bf16",
    "reduce_messages nvfp4 to fp32 world 8",
    "reduce_peer_messages mxfp8 to fp32 world 8",
    "quantize_mx_with_transpose e4m3 from bf16",
    "quantize_nvfp4_with_transpose from bf16 hadamard",
    "amax_nvfp4_with_transpose of bf16",
    "quantize_fp8_with_transpose tensor from bf16",
    "quantize_fp8_with_transpose delayed from bf16",
    "quantize_fp8_grouped e4m3 from bf16",
    "quantize_mx_grouped e2m1 from bf16 stochastic",
    "quantize_nvfp4_grouped from bf16",
    "amax_nvfp4_grouped of bf16",
    "flat_adamw bf16 to bf16",
    "flat_sgd bf16 to bf16",
    "l2_norm of bf16",
]

standard_case = pytest.mark.parametrize("case", STANDARD, ids=lambda case: case.full_name)


def _numel(name):
    has_blocks = "128x128" in name or "with_transpose" in name
    return SQUARES_NUMEL if has_blocks else ROWS_NUMEL


def _short_of_the_last(case, size):
    """The case with a call that does not see the last number, or leaves its result wrong, where as
    much is read as at full size.
    """

    def call(operands, **options):
        if sum(one.numel() for one in (*operands.read, *operands.updated)) < size:
            return case.call(operands, **options)
        if parts.is_decided_by_all(case):
            last = operands.read[-1].view(-1)[-1:]
            kept = last.clone()
            last.zero_()
            results = case.results(operands, **options)
            last.copy_(kept)
            return tuple(results)
        results = case.results(operands, **options)
        _spoil_the_last(case, operands, results)
        return tuple(results)

    return replace(case, call=call)


def _spoil_the_last(case, operands, results):
    """Behind the last number of a flat buffer, or of a message's codes, there is none of it."""
    if case.op == "pack_":
        offset = sum(-(-one.numel() // 128) * 128 for one in operands.read[:-1])
        results = [results[0][: offset + operands.read[-1].numel()]]
    if case.op == "pack_message_":
        results = [_codes(case, operands, results[0])]
    last = results[-1 if case.op.startswith("unpack") else 0]
    last.view(-1).view(torch.uint8)[-1] ^= 1


def _codes(case, operands, message):
    """The codes of all tensors, without those of the gap behind the last one."""
    layout = message_layout(case.format, [one.numel() for one in operands.read])
    end = layout.offsets[-1] + operands.read[-1].numel()
    return message[layout.data_at : layout.data_at + layout.data_bytes * end // layout.numel]


def test_parts_of_every_op_that_is_measured_are_cut_here():
    assert {case.op for case in STANDARD} == {BY_NAME[name].op for name in CUT}


@pytest.mark.parametrize("name", CUT)
def test_a_fault_in_the_tail_of_what_is_timed_is_found(name, monkeypatch):
    monkeypatch.setattr(parts, "PART_NUMEL", 4096)
    case = BY_NAME[name]
    operands = case.operands(CPU, _numel(name))
    before = operands.copied()
    assert parts.fault(case, operands) is None
    assert all(map(torch.equal, operands.read, before.read))
    size = sum(one.numel() for one in (*operands.read, *operands.updated))
    found = parts.fault(_short_of_the_last(case, size), operands)
    assert found == "not the bits of its definition in the tail"


def test_a_call_that_fails_leaves_what_it_reads_as_it_was():
    case = BY_NAME["l2_norm of bf16"]
    operands = case.operands(CPU, NUMEL)
    before = operands.copied()

    def call():
        raise RuntimeError("no such address")

    with pytest.raises(RuntimeError, match="no such address"):
        parts.fault(case, operands, call)
    assert all(map(torch.equal, operands.read, before.read))


@standard_case
def test_rotated_operands_lie_in_twice_the_cache(case):
    cache_bytes = 64 * 1024
    rotation = rotation_of(case.operands(CPU, NUMEL), cache_bytes)
    memories = {
        tensor.data_ptr(): tensor.nbytes
        for one in rotation
        for tensor in (*one.read, *one.written, *one.updated, *one.scalars)
    }
    assert sum(memories.values()) >= 2 * cache_bytes


@standard_case
def test_rivals_run_again_and_again(case):
    operands = case.operands(CPU, NUMEL)
    for name, bind in candidates_of(case, compiled=False).items():
        try:
            run = bind(operands)
        except ImportError:
            assert "TransformerEngine" in name or "torchao" in name
        else:
            run()
            run()


def test_what_only_we_make_has_no_rivals():
    """And every case is asked for them."""
    rivals = {name: candidates_of(case, compiled=False) for name, case in BY_NAME.items()}
    alone = ("quantize_mx e4m3 from bf16 swizzled", "quantize_mx e5m2 from bf16",
             "cast e8m0 from bf16", "pack bf16 to bf16 scaled")  # fmt: skip
    assert all(set(rivals[name]) == {"sidestream"} for name in alone)
    assert all(plain_of(BY_NAME[name]) is None for name in alone)


@standard_case
def test_plain_pytorch_needs_no_other_package(case, monkeypatch):
    """One that imports such a package raises."""
    for package in ("torchao", "transformer_engine"):
        monkeypatch.setitem(sys.modules, package, None)
    plain = plain_of(case)
    if plain is not None:
        plain(case.operands(CPU, NUMEL))()


@pytest.mark.parametrize(
    ("name", "ties"),
    [
        ("quantize_mx e4m3 from bf16", 0.0),
        ("quantize_mx e2m1 from bf16", 0.0),
        ("quantize_nvfp4 from bf16", 0.01),
    ],
    ids=["mxfp8", "mxfp4", "nvfp4"],
)
def test_plain_pytorch_quantizes_blocks_as_they_are_defined(name, ties):
    """Where a factor is rounded elsewhere, a tie goes the other way here and there."""
    case = BY_NAME[name]
    found, operands = case.operands(CPU, NUMEL), case.operands(CPU, NUMEL)
    returned = plain_of(case)(found)()
    expected = case.results(operands)
    for one, other in zip(returned or found.written, expected, strict=True):
        differ = one.view(torch.uint8) != other.view(torch.uint8)
        assert differ.float().mean() <= ties


def test_rivals_of_pack_make_the_same_numbers():
    """They are bound to other memory than ours, so what they leave there is looked for."""
    case = BY_NAME["pack bf16 to fp32"]
    operands = case.operands(CPU, 100_000)
    expected = torch.cat([one.reshape(-1).float() for one in operands.read])
    for name, bind in rivals_of(case).items():
        returned = bind(operands)()
        found = returned if name == "_foreach_copy_" else [returned]
        assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in found]), expected), name


# Packages that are not installed here, by fakes that tell how they are called.


def _module(monkeypatch, name, **functions):
    parent = ""
    for part in name.split("."):
        parent = f"{parent}.{part}".lstrip(".")
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for function, value in functions.items():
        monkeypatch.setattr(sys.modules[name], function, value, raising=False)


@pytest.fixture
def called(monkeypatch):
    """What is called of torchao, by name; `torch.compile` is told of, and does nothing."""
    names = []

    def recorded(name):
        return lambda *arguments: names.append(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda one, **_: names.append("compiled") or one)
    for module, functions in {
        "mx_tensor": ["to_mx"],
        "kernels": ["triton_to_mxfp8_dim0", "triton_quantize_nvfp4", "triton_mxfp8_dequant_dim0"],
        "nvfp4_tensor": ["nvfp4_quantize"],
    }.items():
        found = {name: recorded(name) for name in functions}
        found["per_tensor_amax_to_scale"] = lambda amax: amax / 2688
        _module(monkeypatch, f"torchao.prototype.mx_formats.{module}", **found)
    return names


@pytest.mark.parametrize(
    ("name", "rival", "expected"),
    [
        ("quantize_mx e4m3 from bf16", packages.TORCHAO, ["compiled", "to_mx"]),
        ("quantize_mx e4m3 from bf16", packages.TORCHAO_TRITON, ["triton_to_mxfp8_dim0"]),
        ("quantize_mx e2m1 from bf16", packages.TORCHAO, ["compiled", "to_mx"]),
        ("dequantize_mx e4m3 to bf16", packages.TORCHAO_TRITON, ["triton_mxfp8_dequant_dim0"]),
        ("quantize_nvfp4 from bf16", packages.TORCHAO, ["compiled", "nvfp4_quantize"]),
        ("quantize_nvfp4 from bf16", packages.TORCHAO_TRITON, ["triton_quantize_nvfp4"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torchao_runs_as_its_users_run_it(name, rival, expected, called):
    case = BY_NAME[name]
    candidates_of(case, compiled=True)[rival](case.operands(CPU, NUMEL))()
    assert called == expected


def test_what_is_compiled_competes_where_that_is_asked_for():
    case = BY_NAME["quantize_mx e4m3 from bf16"]
    alone = candidates_of(case, compiled=False)
    assert next(iter(alone)) == "sidestream"
    more = candidates_of(case, compiled=True)
    assert set(more) - set(alone) == {packages.TORCHAO, "torch.compile"}


ROWS, COLUMNS = ({"rowwise": rows, "columnwise": not rows} for rows in (True, False))
ROTATED = {"with_rht": True, "with_post_rht_amax": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("quantize_nvfp4 from bf16", ROWS),
        ("quantize_nvfp4 from bf16 stochastic", {**ROWS, "stochastic_rounding": True}),
        ("quantize_nvfp4 from bf16 hadamard", {**COLUMNS, **ROTATED}),
    ],
    ids=["nearest", "stochastic", "hadamard"],
)
def test_transformer_engine_has_rows_where_it_has_quantisers(name, options, monkeypatch):
    made = []

    class Quantizer:
        def __init__(self, **given):
            made.append(given)

        def make_empty(self, shape, *, dtype, device):
            return torch.empty(shape, dtype=dtype, device=device)

        def update_quantized(self, x, out):
            made.append((x, out))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _module(monkeypatch, "transformer_engine.pytorch", NVFP4Quantizer=Quantizer)
    _module(monkeypatch, "transformer_engine_torch", DType=None)
    case = BY_NAME[name]
    operands = case.operands(CPU, NUMEL)
    (bind,) = (bind for rival, bind in rivals_of(case).items() if packages.ENGINE in rival)
    bind(operands)()
    assert made[0] == options
    assert made[1][0] is operands.read[0]
