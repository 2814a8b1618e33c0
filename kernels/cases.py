"""All cases of all ops, and docs/kernels.md, which `python -m sidestream.kernels.cases` prints.

Each folder has its own in `cases.py`; `case` tells what a case is. Targets by GPU, and limits
elsewhere than on sm_90, follow from `ahead/counted.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from .ahead import counted
from .ahead.machines import GPUS, PIPE_SHARE
from .case import GATED_TARGET, Case, Gate, Row
from .cast import cases as cast
from .fp8 import cases as fp8
from .grouped import cases as grouped
from .mx import cases as mx
from .nvfp4 import cases as nvfp4
from .optim import cases as optim
from .pack import cases as pack
from .transposed import cases as transposed
from .wire import cases as wire

_INTRODUCTION = """\
<!-- Made by `make docs` from kernels/cases.py and the cases.py of each folder: change those. -->

# Kernels

Every op is a function of `sidestream.kernels`, on CPU and GPU and on tensors without data. Behind
it is one of `torch.ops.sidestream`, whose name ends in `_`: that takes every argument as it is, the
memory for its results among them, and leaves the checks to the function, so that wrong ones may
write anywhere. An op's definition is plain PyTorch, `reference.py` in its folder: that runs on a
CPU and is the oracle of the Triton kernel, to which the interpreter agrees bit for bit. All kernels
compile without spills for sm_80, sm_89, sm_90, sm_100, sm_103, sm_120 and gfx942; FP8 is converted
by the hardware from sm_90 on and by arithmetic elsewhere, to the same bits. FP4 is rounded to
nearest and decoded by the instructions of sm_100a, sm_103a, sm_110a, sm_120a and sm_121a. They have
not run here: a model of them, made from their specification, is compared with the arithmetic that
all else takes, and a test marked `gpu` compares every FP32. sm_90 decodes FP4 by permuting a
table's bytes.

*bytes an element*: what must move, once; *of a copy*: the part of a copy's rate that large sizes
are to reach on a GPU, **a target until measured** (0.60 with stochastic rounding, 0.70 to e2m1),
and less where a GPU's pipes leave less: see below.
"""


_TARGETS = f"""
The part of a copy's rate: the smaller of *of a copy* and {PIPE_SHARE:g} of what the pipes leave, at
which warps can issue every instruction, or at half that rate those of integers, logic and
conversions. Only the cases are here that get less on a GPU; a product is what its data sheet says.

"""
_NOTES = """
A case is a call, and what it would launch is compiled. Instructions are counted in the final
machine code, on the path of full tiles, which makes nearly all its accesses by 16 bytes; `-` where
there is no limit. Registers are those of all paths, the most of all kernels of a call. On sm_90
limits are those of the cases, elsewhere half an instruction and eight registers above what was last
counted (`kernels/ahead/counted.json`), and 64 registers at least; sm_103, which gets the same code,
has those of sm_100. `sidestream inspect` prints what is counted.

## NaN and infinity

| to | NaN | too large, or infinity |
|---|---|---|
| bf16, fp16 | NaN | infinity, as IEEE 754; stochastic bf16: a finite value stays finite |
| e4m3, e5m2 | 0x7F | largest finite value, of its sign |
| e4m3fnuz | 0x80 | largest finite value, of its sign |
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
follows them. So are seeds and scales that are tensors of one element, int64 and FP32: a graph that
adds 1 to a seed draws new noise in each replay, the same as with that number; an integer's noise
would be that of the capture. A seed is the whole state of the noise, which has no counter besides.
Tables of addresses that a capture makes are kept until the process ends, since every
replay reads them; tensors must stay where they were. Run a step before capturing, so that kernels
are compiled.
"""

SECTIONS = (
    ("Many tensors at once", pack.rows()),
    ("Casts", (*cast.rows(), *fp8.rows())),
    ("Block formats", (*mx.rows(), *nvfp4.rows(), *grouped.rows())),
    ("A matrix and its transpose", transposed.rows()),
    ("Wire messages", wire.rows()),
    ("Optimizers", optim.rows()),
)
"""What docs/kernels.md has, section by section."""


def rows() -> tuple[Row, ...]:
    """Every op's."""
    return tuple(row for _, rows in SECTIONS for row in rows)


def cases(worlds: Sequence[int] | None = None) -> tuple[Case, ...]:
    """Every case, in the order of the rows; sums are over `worlds` ranks, by default the usual."""
    found = (
        *pack.cases(worlds),
        *cast.cases(),
        *fp8.cases(),
        *mx.cases(),
        *nvfp4.cases(),
        *grouped.cases(),
        *transposed.cases(),
        *wire.cases(worlds),
        *optim.cases(),
    )
    order = [row.op for row in rows()]
    return tuple(sorted(found, key=lambda case: order.index(case.op)))


def by_name() -> dict[tuple[str, str], Case]:
    """Every case by its op and name, for who wants many: making them all takes 3 ms."""
    return {(case.op, case.name): case for case in cases()}


def case_of(op: str, name: str) -> Case:
    """The case `name` of the op called `op`; `KeyError` if there is none."""
    found = by_name().get((op, name))
    if found is None:
        raise KeyError(f"{op}: no case {name!r}")
    return found


def markdown() -> str:
    """All of docs/kernels.md."""
    return "\n".join([*_INTRODUCTION.splitlines(), *_tables(), *_NOTES.splitlines(), ""])


def _tables() -> Iterator[str]:
    for title, found in SECTIONS:
        yield from ("", f"## {title}", "")
        yield "| op | formats | bytes an element | rounding | compared with | of a copy | source |"
        yield "|---|---|---|---|---|---|---|"
        for row in found:
            share = "-" if row.copy_share is None else f"{row.copy_share:.2f}"
            cells = (f"`{row.function}`", row.formats, row.moved, row.rounding, row.proof)
            yield f"| {' | '.join((*cells, share, row.source))} |"
    yield from _target_table()
    yield from _gate_table()


def _target_table() -> Iterator[str]:
    counts = (*counted.TARGETS, *counted.COUNTED_AS)
    known = [gpu for gpu in GPUS if gpu.target in counts]
    yield from ("", "## Targets by GPU", *_TARGETS.splitlines())
    yield f"| op | case | {' | '.join(gpu.name for gpu in known)} |"
    yield f"|---|---|{'---|' * len(known)}"
    for function, case in _with_functions():
        if case.copy_share is None or not counted.is_counted(case):
            continue
        shares = [f"{counted.target_share(case, gpu):.2f}" for gpu in known]
        if set(shares) != {f"{case.copy_share:.2f}"}:
            yield f"| `{function}` | {case.name} | {' | '.join(shares)} |"


def _gate_table() -> Iterator[str]:
    targets = (GATED_TARGET, *(name for name in counted.TARGETS if name != GATED_TARGET))
    yield from ("", "## Gates", "", "Instructions an element and registers, at most.", "")
    yield f"| op | case | {' | '.join(targets)} |"
    yield f"|---|---|{'---|' * len(targets)}"
    for function, case in _with_functions():
        if case.gate is None:
            continue
        limits = " | ".join(_limits(counted.gate_of(case, target)) for target in targets)
        yield f"| `{function}` | {case.name} | {limits} |"


def _with_functions() -> Iterator[tuple[str, Case]]:
    """The cases, each behind its public function's name."""
    functions = {row.op: row.function for row in rows()}
    return ((functions[case.op], case) for case in cases())


def _limits(gate: Gate | None) -> str:
    if gate is None:
        return "-"
    count = "-" if gate.instructions is None else f"{gate.instructions:g}"
    return f"{count}, {gate.registers}"


if __name__ == "__main__":
    sys.stdout.write(markdown())
