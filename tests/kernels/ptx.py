"""A model of the PTX that kernels contain, for Triton's interpreter, which has none: NumPy.

`modelled()` makes `tl.inline_asm_elementwise` run the text itself, an instruction a line, as "PTX
ISA" 9.0 defines each. Registers hold uint32, whatever their width.
"""

import contextlib
import re

import numpy as np
import pytest
from triton.runtime import interpreter

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""E2M1's, by code."""
HALF_WAY = (VALUES[1:] + VALUES[:-1]) / 2
# The least number of each code but 0: half way, where that goes to the even code, or next to it.
LEAST = np.where(np.arange(1, 8) % 2, np.nextafter(HALF_WAY, np.float32(9)), HALF_WAY)
NUMPY = {"fp32": np.float32, "uint32": np.uint32}


def e2m1_of(word):
    """The code of FP32 bits: to nearest, ties to even, saturating; +6 of a NaN."""
    x = word.view(np.float32)
    code = np.searchsorted(LEAST, np.abs(x), side="right").astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(7), code | word >> 31 << 3)


def fp16_of(code):
    """The bits of an FP16 of that value."""
    bits = VALUES.astype(np.float16).view(np.uint16).astype(np.uint32)[code & 7]
    return bits | (code >> 3 & 1) << 15


def permuted(a, b, selector):
    """Bytes of both, b's after a's; the fourth bit of a selector spreads the byte's own sign."""
    made = np.zeros_like(selector)
    for at in range(4):
        select = selector >> 4 * at & 15
        byte = np.where(select & 4, b, a) >> (select & 3) * 8 & 255
        made |= np.where(select & 8, (byte >> 7) * 255, byte) << 8 * at
    return made.astype(np.uint32)


OPERATIONS = {
    "cvt.rn.satfinite.e2m1x2.f32": lambda high, low: e2m1_of(low) | e2m1_of(high) << 4,
    "cvt.rn.f16x2.e2m1x2": lambda byte: fp16_of(byte & 15) | fp16_of(byte >> 4) << 16,
    "cvt.f32.f16": lambda half: (
        half.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    ),
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "prmt.b32": permuted,
}


def run(text, registers):
    """Run the lines of a text; `registers` has what $0, $1, ... are, and what becomes of them."""

    def value(name):
        if re.match(r"\d", name):
            shape = next(iter(registers.values())).shape
            return np.full(shape, int(name, 0), np.uint32)
        return registers[name]

    for line in text.strip("{}\n ").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        if operation == "mov.b32":
            _move(operands, registers)
            continue
        target, *sources = operands.split(", ")
        registers[target] = OPERATIONS[operation](*map(value, sources))


def _move(operands, registers):
    """Between a register and its parts, the lowest of which comes first."""
    target, source = re.fullmatch(r"(\{.*\}|[^{]*), (\{.*\}|[^{]*)", operands).groups()
    parts = re.findall(r"\w+", target if "{" in target else source)
    width = 32 // len(parts)
    if "{" in target:
        for at, part in enumerate(parts):
            registers[part] = registers[source] >> width * at & (1 << width) - 1
    else:
        registers[target] = sum(registers[part] << width * at for at, part in enumerate(parts))


class _Results:
    """What the interpreter takes for the operation: its results, by `get_result`."""

    def __init__(self, handles):
        self.get_result = handles.__getitem__


def _create_inline_asm(self, text, constraints, values, types, is_pure, pack):
    assert is_pure and pack == 1 and constraints.count(",") + 1 == len(types) + len(values)
    registers = {
        f"${len(types) + at}": value.data.view(np.uint32) for at, value in enumerate(values)
    }
    run(text, registers)
    dtypes = [kind.scalar for kind in types]
    made = [registers[f"${at}"].view(NUMPY[dtype.name]) for at, dtype in enumerate(dtypes)]
    return _Results([*map(interpreter.TensorHandle, made, dtypes)])


@contextlib.contextmanager
def modelled():
    """Within the block the interpreter runs inline PTX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _create_inline_asm)
        yield
