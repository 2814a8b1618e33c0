"""Owns the list of all ops: what each moves, how it rounds, and the limits that hold it.

`python -m sidestream.kernels.registry` prints docs/kernels.md, which `make docs` writes. Tests read
their limits here, the benchmark its targets; one fails when an op has no row, or a row no op.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

FP4_SHARE = 0.70
STOCHASTIC_SHARE = 0.60

_INTRODUCTION = """\
<!-- Made by `make docs` from kernels/registry.py: change that. -->

# Kernels

Every op is a function of `sidestream.kernels`, on CPU and GPU and on tensors without data. Behind
it is one of `torch.ops.sidestream`, whose name ends in `_`: that takes every argument as it is, the
memory for its results among them, and leaves the checks to the function, so that wrong ones may
write anywhere. An op's definition is plain PyTorch, `kernels/reference*.py`: that runs on a CPU
and is the oracle of the Triton kernel, to which the interpreter agrees bit for bit. All kernels
compile without spills for sm_80, sm_89, sm_90, sm_100, sm_120 and gfx942; FP8 is converted by the
hardware from sm_90 on and by arithmetic elsewhere, to the same bits; FP4 by arithmetic everywhere,
since the instructions of sm_100a and sm_103a have not run here to be compared.

*bytes an element*: what must move, once; *of a copy*: the part of a copy's rate that large sizes
are to reach on a GPU, **a target until measured** (0.60 with stochastic rounding, 0.70 to e2m1).
"""

_NOTES = """
Instructions are counted in the final machine code, on the path of full tiles, whose widest side has
16-byte accesses; `-` where the paths cannot be told apart. Registers are those of the kernel that
is launched, all its paths included. Every run of the tests prints the counts.

## NaN and infinity

| to | NaN | too large, or infinity |
|---|---|---|
| bf16, fp16 | NaN | infinity, as IEEE 754; stochastic bf16: a finite value stays finite |
| e4m3, e5m2 | 0x7F | largest finite value, of its sign |
| e2m1 | +6 | +-6 |
| e8m0 | 255 | 2^127; infinity 255 |
| FP8 with scales | scale 1 where the amax is NaN, infinite or 0; elements as above | with \
powers of two, values near FLT_MAX may decode to infinity |
| MXFP8, MXFP4 | scale byte 255: the block decodes to NaNs | same for infinity |
| NVFP4 | left out of every amax, +6 | an infinite amax counts as scale 1 |

No other block is ever affected. Stochastic rounding takes 32 bits of Philox4x32-7, a function of
the seed and of the element's index alone (`kernels/formats/noise.py`).

## Optimizers and torch

`flat_adamw_` and `flat_sgd_` compute torch's formulas in torch's order, each operation rounded
once; torch's own CPU kernels contract some products and sums. From the same state, one step of
AdamW differs from `torch.optim.AdamW(foreach=False)` by at most

| | difference |
|---|---|
| `exp_avg` | 1 ulp of the largest of its old value, the gradient and its new value |
| `exp_avg_sq` | 1 ulp |
| `param` | 1 ulp where the update is at most 1/8 of it, else 1 ulp + 8 ulps of the update; both \
as long as `exp_avg` does not cancel |

Where the gradient cancels `exp_avg`, the ulp of the larger of the two is many of the small result,
and of the update made from it.

One step of SGD: the momentum by 2 ulps of its largest term, the parameter by 1 ulp + 3 ulps of the
update.

## CUDA graphs

No op waits for the device, and lr, step, clip factor and found_inf are read there, so a graph
follows them. Tables of addresses that a capture makes are kept until the process ends, since every
replay reads them; tensors must stay where they were. Run a step before capturing, so that kernels
are compiled.
"""


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits of one configuration, compiled for sm_90: it never spills.

    instructions: an element, in the final machine code of the path of full tiles, `None` where that
    path cannot be told apart. registers: of a thread, of a kernel that is launched. Both leave room
    above what Triton 3.6 and 3.7 make, about half an instruction, since each release brings another
    compiler.
    """

    case: str
    instructions: float | None
    registers: int = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One op, `torch.ops.sidestream.<op>`, behind the public `function`.

    moved: bytes an element. proof: what its bits, or values, are compared with. copy_share: the
    part of the rate of a copy that large sizes are to reach on a GPU, a target until measured.
    """

    op: str
    function: str
    formats: str
    moved: str
    rounding: str
    proof: str
    source: str
    copy_share: float | None
    gates: tuple[Gate, ...] = ()


_MANY = "fp32, bf16, fp16, mixed"
_ONCE = "nearest even, once"
_MX_ROUNDING = "codes: nearest even or stochastic, saturating; scales: rceil, floor, ceil, even"
_PACK_GATES = (
    *(Gate(f"{to} accumulate", None, 40) for to in ("fp32", "bf16", "fp16")),
    Gate("bf16", None, 40),
)
_OPTIMIZER = "fp32 param, moments; fp32, bf16, fp16 gradient; bf16, fp16, e4m3 compute shard"

MANY_TENSORS = (
    Row(
        "pack_", "pack_", _MANY,
        "source + destination; the destination twice with accumulate", _ONCE,
        "bit-exact: `pack.reference`, a naive loop", "this project", 0.92,
        _PACK_GATES,
    ),
    Row(
        "unpack_", "unpack_", _MANY,
        "source + destination; the destination twice with accumulate", _ONCE,
        "bit-exact: `pack.reference`, a naive loop", "this project", 0.92,
        _PACK_GATES,
    ),
    Row(
        "reduce_", "reduce_", "fp32, bf16, fp16",
        "world * part + result; the result twice with accumulate",
        "fp32 sum in rank order, then nearest even, once",
        "bit-exact: `pack.reference`, a naive loop", "this project", 0.90,
        (
            *(Gate(f"bf16 -> fp32 world {world}", None, 48) for world in (2, 8, 64)),
            Gate("fp32 -> fp32 world 8", None, 48), Gate("fp32 -> bf16 world 8", None, 48),
        ),
    ),
)  # fmt: skip

CASTS = (
    Row(
        "cast_", "cast", "fp32, bf16, fp16 -> bf16, fp16, e4m3, e5m2, e2m1, e8m0",
        "source + 2, 2, 1, 1, 0.5, 1",
        "nearest even, to e8m0 ties up, saturating (not bf16, fp16); or stochastic",
        "bit-exact: ml_dtypes on all bf16 and on boundary fp32", "OFP8 1.0; OCP MX 1.0", 0.88,
        (
            Gate("bf16", 4.0), Gate("fp16", 4.0), Gate("bf16 stochastic", 27.0),
            Gate("e4m3", 4.0), Gate("e5m2", 4.0),
            Gate("e2m1", 17.0), Gate("e8m0", 15.0), Gate("e4m3 stochastic", 20.0),
            Gate("e5m2 stochastic", 20.0), Gate("e2m1 stochastic", 25.0),
        ),
    ),
    Row(
        "cast_back_", "cast_back", "bf16, fp16, e4m3, e5m2, e2m1, e8m0 -> fp32, bf16, fp16",
        "2, 2, 1, 1, 0.5, 1 + result", "exact in fp32, else nearest even, once",
        "bit-exact: ml_dtypes on every code", "OFP8 1.0; OCP MX 1.0", 0.88,
        (
            Gate("bf16", 4.0), Gate("fp16", 4.0), Gate("e4m3", 5.0), Gate("e5m2", 6.5),
            Gate("e2m1", 11.5), Gate("e8m0", 11.0),
        ),
    ),
    Row(
        "quantize_fp8_", "quantize_fp8",
        "fp32, bf16, fp16 -> e4m3, e5m2; scaling tensor, row, 1x128, 128x128, delayed",
        "source (twice: tensor, rows above 16384) + 1 + 4 / block",
        "nearest even, saturating; scale = max / amax, IEEE division; powers of two on request",
        "bit-exact: torchao (tensor, row), golden vectors",
        "TransformerEngine; DeepSeek-V3 3.3.2", 0.88,
        (
            Gate("1x128", 10.0), Gate("1x128 of rows", 14.0), Gate("short rows", 10.0),
            Gate("rows", 10.0), Gate("long rows", 10.0), Gate("128x128", 10.0, 128),
            Gate("known scale", 7.0), Gate("delayed", 14.0),
        ),
    ),
    Row(
        "dequantize_fp8_", "dequantize_fp8", "e4m3, e5m2 -> fp32, bf16, fp16",
        "1 + 4 / block + result", _ONCE, "bit-exact: `fp8.reference`", "as quantize_fp8_", 0.88,
        (
            *(Gate(scaling, 14.0) for scaling in ("tensor", "row", "1x128")),
            Gate("128x128", 14.5),
        ),
    ),
    Row(
        "update_fp8_scales_", "update_fp8_scales_", "fp32 history -> fp32 scales",
        "8 a history entry", "IEEE division", "bit-exact: `fp8.reference`, golden vectors",
        "TransformerEngine, delayed scaling", None,
    ),
)  # fmt: skip

BLOCK_FORMATS = (
    Row(
        "quantize_mx_", "quantize_mx", "fp32, bf16, fp16 -> mxfp8 (e4m3, e5m2), mxfp4",
        "source + 1 or 0.5 + 1/32", _MX_ROUNDING,
        "bit-exact: torchao (floor, ceil, even, rceil), golden vectors", "OCP MX 1.0, 6.3", 0.88,
        (
            Gate("e4m3", 6.5), Gate("e5m2", 6.5), Gate("e2m1", 18.0),
            Gate("e2m1 stochastic", 18.0), Gate("e4m3 stochastic", 20.5),
            Gate("e4m3 swizzled", 8.0), Gate("e2m1 swizzled", 19.5),
            Gate("e2m1 stochastic swizzled", 19.5),
        ),
    ),
    Row(
        "dequantize_mx_", "dequantize_mx", "mxfp8, mxfp4 -> fp32, bf16, fp16",
        "1 or 0.5 + 1/32 + result", _ONCE, "bit-exact: `mx.reference`", "OCP MX 1.0, 6.3", 0.88,
        (
            Gate("e4m3", 6.5), Gate("e2m1", 10.5),
            Gate("e4m3 swizzled", 9.5), Gate("e2m1 swizzled", 12.5),
        ),
    ),
    Row(
        "amax_nvfp4_", "amax_nvfp4", "fp32, bf16, fp16 -> fp32", "source", "exact",
        "bit-exact: `nvfp4.reference`", "TransformerEngine", 0.92,
        (Gate("bf16", 4.0, 72), Gate("fp32", 3.5, 72), Gate("fp32 hadamard", 8.5)),
    ),
    Row(
        "quantize_nvfp4_", "quantize_nvfp4", "fp32, bf16, fp16 -> nvfp4 (e2m1, e4m3, fp32)",
        "source + 0.5 + 1/16", "codes: nearest even or stochastic; scales: nearest even",
        "bit-exact: torchao (its variant), golden vectors (TE's)",
        "TransformerEngine; torchao", 0.70,
        (
            Gate("nearest", 22.5), Gate("nearest fp32", 22.0), Gate("stochastic", 22.5, 96),
            Gate("torchao", 24.0), Gate("swizzled", 24.5), Gate("hadamard", 29.5, 72),
            Gate("hadamard stochastic", 30.0, 96), Gate("hadamard stochastic swizzled", 31.5, 96),
        ),
    ),
    Row(
        "dequantize_nvfp4_", "dequantize_nvfp4", "nvfp4 -> fp32, bf16, fp16",
        "0.5 + 1/16 + result", _ONCE, "bit-exact: `nvfp4.reference`",
        "TransformerEngine; torchao", 0.88,
        (Gate("te bf16", 11.0), Gate("torchao fp32", 14.0), Gate("te bf16 swizzled", 15.5)),
    ),
    Row(
        "hadamard16_", "hadamard16", "fp32, bf16, fp16", "source + result",
        "fp32 sums in a fixed order, then nearest even, once",
        "bit-exact: `nvfp4.reference_hadamard`; its matrix in FP64",
        "NVIDIA, NVFP4 pretraining, 2025", 0.88,
        (Gate("forward bf16", 9.0), Gate("inverse fp32", 9.0)),
    ),
)  # fmt: skip

_MESSAGE = "fp32, bf16, fp16, fp8_row, fp8_1x128, mxfp8, mxfp4, nvfp4 with scales"
_SUM_OF_8 = (
    ("fp32 -> fp32", 23.0), ("bf16 -> fp32", 33.0), ("bf16 -> bf16", 29.0),
    ("fp16 -> fp32", 29.0), ("fp8_row -> fp32", 41.0), ("fp8_1x128 -> bf16", 40.0),
    ("mxfp8 -> fp32", 43.0), ("mxfp8 -> bf16", 42.0), ("mxfp4 -> fp32", 57.0),
    ("mxfp4 -> bf16", 56.0), ("nvfp4 -> fp32", 62.0), ("nvfp4 -> bf16", 61.0),
)  # fmt: skip

_PACKED = (
    ("fp32 from bf16", 5.0, 40), ("bf16 from bf16", 1.75, 40), ("bf16 from fp32", 2.5, 40),
    ("bf16 from bf16 stochastic", 11.5, 48), ("fp8_row from bf16", 10.5, 64),
    ("fp8_1x128 from bf16", 9.5, 64), ("fp8_1x128 from bf16 stochastic", 24.0, 88),
    ("mxfp8 from bf16", 6.0, 64), ("mxfp8 from bf16 stochastic", 21.5, 64),
    ("mxfp4 from bf16", 18.5, 64), ("mxfp4 from bf16 stochastic", 18.5, 64),
    ("mxfp4 from fp32 stochastic", 18.0, 64),
    ("nvfp4 from bf16", 23.5, 72), ("nvfp4 from bf16 stochastic", 23.5, 96),
    ("nvfp4 from fp32 stochastic", 23.0, 96),
)  # fmt: skip
_UNPACKED = (
    ("fp32 to bf16", 3.0, 48), ("bf16 to bf16", 2.0, 40), ("fp16 to fp16", 2.0, 40),
    ("fp8_row to bf16", 6.0, 48), ("fp8_1x128 to bf16", 6.5, 48), ("mxfp8 to bf16", 7.0, 48),
    ("mxfp4 to bf16", 11.5, 48), ("nvfp4 to bf16", 14.5, 48),
)  # fmt: skip

MESSAGES = (
    Row(
        "pack_message_", "pack_message_", f"fp32, bf16, fp16, mixed -> {_MESSAGE}",
        "source + message", "as the format's cast; or stochastic (not fp32, fp16)",
        "bit-exact: the formats' own casts, golden vectors", "this project", 0.92,
        tuple(Gate(*limits) for limits in _PACKED),
    ),
    Row(
        "unpack_message_", "unpack_message_", f"{_MESSAGE} -> fp32, bf16, fp16, mixed",
        "message + result; the result twice with accumulate", _ONCE,
        "bit-exact: the formats' own decoders", "this project", 0.92,
        tuple(Gate(*limits) for limits in _UNPACKED),
    ),
    Row(
        "reduce_messages_", "reduce_messages_", f"{_MESSAGE} -> fp32, bf16, fp16",
        "world * message + result; the result twice with accumulate",
        "decoded by one product, fp32 sum in rank order, then nearest even, once",
        "bit-exact: `wire.reference_sum`, the formats' own decoders", "this project", 0.90,
        tuple(Gate(f"{case} world 8", limit, 96) for case, limit in _SUM_OF_8),
    ),
    Row(
        "reduce_peer_messages_", "reduce_peer_messages_", f"{_MESSAGE} -> fp32, bf16, fp16",
        "as reduce_messages_, and 8 of address a message and program",
        "as reduce_messages_", "bit-exact: `wire.reference_sum`", "this project", 0.90,
    ),
)  # fmt: skip

_STEPS = ("bf16 -> bf16", "bf16 -> none", "fp32 -> bf16", "bf16 -> e4m3")

OPTIMIZERS = (
    Row(
        "flat_adamw_", "flat_adamw_", _OPTIMIZER, "24 + gradient + compute",
        "fp32, one rounding an operation, IEEE division and root; fp64 scalars",
        "bit-exact: `optim.reference`; torch.optim.AdamW: see below", "torch.optim.AdamW", 0.92,
        tuple(
            Gate(step, 110.0, 128) for step in (*_STEPS, "bf16 -> bf16 one segment")
        ),
    ),
    Row(
        "flat_sgd_", "flat_sgd_", _OPTIMIZER, "8, 16 with momentum, + gradient + compute",
        "fp32, one rounding an operation; fp64 scalars",
        "bit-exact: `optim.reference`; torch.optim.SGD: see below", "torch.optim.SGD", 0.92,
        tuple(
            Gate(step, 45.0, 128) for step in (*_STEPS, "bf16 -> bf16 one segment")
        ),
    ),
    Row(
        "l2_norm_", "l2_norm_", "fp32, bf16, fp16, mixed -> fp32", "source, twice",
        "fp32 sums of 128 squares, over the largest, added as integers; fp64 root, once",
        "bit-exact: `optim.norm_reference`", "this project", 0.92,
        (
            Gate("fp32", 10.5, 128), Gate("half", 11.0, 128),
            Gate("fp32 largest", 2.85, 128), Gate("half largest", 3.3, 128),
        ),
    ),
)  # fmt: skip

SECTIONS = (
    ("Many tensors at once", MANY_TENSORS),
    ("Casts", CASTS),
    ("Block formats", BLOCK_FORMATS),
    ("Wire messages", MESSAGES),
    ("Optimizers", OPTIMIZERS),
)
ROWS = tuple(row for _, rows in SECTIONS for row in rows)
_BY_OP = {row.op: row for row in ROWS}


def row(op: str) -> Row:
    """The row of the op called `op`; `KeyError` if there is none."""
    return _BY_OP[op]


def gate(op: str, case: str) -> Gate:
    """The gate `case` of the op called `op`; `KeyError` if there is none."""
    for found in _BY_OP[op].gates:
        if found.case == case:
            return found
    raise KeyError(f"{op}: no gate {case!r}")


def target_share(op: str, *, fp4: bool = False, stochastic: bool = False) -> float | None:
    """The part of a copy's rate that the op is to reach on a GPU; a target until measured."""
    share = _BY_OP[op].copy_share
    if share is not None and stochastic:
        return min(share, STOCHASTIC_SHARE)
    return min(share, FP4_SHARE) if share is not None and fp4 else share


def markdown() -> str:
    """All of docs/kernels.md."""
    return "\n".join([*_INTRODUCTION.splitlines(), *_tables(), *_NOTES.splitlines(), ""])


def _tables() -> Iterator[str]:
    for title, rows in SECTIONS:
        yield from ("", f"## {title}", "")
        yield "| op | formats | bytes an element | rounding | compared with | of a copy | source |"
        yield "|---|---|---|---|---|---|---|"
        for found in rows:
            share = "-" if found.copy_share is None else f"{found.copy_share:.2f}"
            cells = (f"`{found.function}`", found.formats, found.moved, found.rounding, found.proof)
            yield f"| {' | '.join((*cells, share, found.source))} |"
    yield from ("", "## Gates on sm_90", "")
    yield "| op | case | instructions an element, at most | registers, at most |"
    yield "|---|---|---|---|"
    for found in ROWS:
        for limits in found.gates:
            count = "-" if limits.instructions is None else f"{limits.instructions:g}"
            yield f"| `{found.function}` | {limits.case} | {count} | {limits.registers} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
