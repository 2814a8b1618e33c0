"""Owns what the gates on compiled kernels measure, and the table of it that ends a run of tests.

Limits are those of `registry`. Every kernel is compiled once a run and target, however many tests
ask for it.
"""

import functools
from dataclasses import dataclass

from sidestream.kernels import ahead, registry
from sidestream.kernels.ahead import compile as aot

OTHERS = tuple(target for target in aot.TARGETS if target != "sm_90")


@dataclass(frozen=True)
class Measured:
    """One row of the table: `instructions` an element, `None` where nobody counts them."""

    op: str
    case: str
    gate: registry.Gate
    instructions: float | None
    registers: int
    spill_bytes: int

    def faults(self):
        """What exceeds the gate, as a list of sentences."""
        found = []
        limit = self.gate.instructions
        if limit is not None and self.instructions > limit:
            found.append(f"{self.instructions:.2f} instructions an element, allowed {limit}")
        if self.registers > self.gate.registers:
            found.append(f"{self.registers} registers, allowed {self.gate.registers}")
        if self.spill_bytes:
            found.append(f"{self.spill_bytes} bytes spilled")
        return found


_table: dict[tuple[str, str], Measured] = {}


def compile_kernel(kernel, signature, constexprs, target, *, num_warps):
    """`ahead.compile.compile_kernel`, once for equal arguments."""
    return _compiled(kernel, tuple(signature.items()), tuple(constexprs.items()), target, num_warps)


def compile_for(configuration, target):
    """`configuration` for `target`, compiled once."""
    constexprs = configuration.constexprs_for(target)
    kernel, signature = configuration.kernel, configuration.signature
    return compile_kernel(kernel, signature, constexprs, target, num_warps=configuration.num_warps)


@functools.cache
def _compiled(kernel, signature, constexprs, target, num_warps):
    return aot.compile_kernel(
        kernel, dict(signature), dict(constexprs), target, num_warps=num_warps
    )


def measure(op, case, compiled, instructions=None):
    """What the gate `case` of `op` finds wrong with a kernel for sm_90; it gets into the table."""
    assert compiled.target == "sm_90"
    gate = registry.gate(op, case)
    assert (instructions is None) == (gate.instructions is None), "a limit that nobody looks at"
    found = Measured(op, case, gate, instructions, compiled.registers, compiled.spill_bytes)
    _table[op, case] = found
    return found.faults()


def measure_case(op, name):
    """The case `name` of `op` compiled for sm_90, and what its gate finds wrong with it."""
    case = ahead.case_of(op, name)
    made = compile_for(case.configuration, "sm_90")
    counted = None if case.gate.instructions is None else case.instructions(made)
    return made, measure(op, name, made, counted)


def measured():
    """Op and case of every gate that was measured so far."""
    return set(_table)


def table_lines():
    """The table of all that was measured, a line a gate; none where nothing was."""
    if not _table:
        return []
    lines = [
        f"{'op':<24} {'case':<34} {'instr/elem':>10} {'limit':>6} {'regs':>5} {'limit':>6} spills"
    ]
    for row in sorted(_table.values(), key=lambda row: (row.op, row.case)):
        count = "-" if row.instructions is None else f"{row.instructions:.2f}"
        limit = "-" if row.gate.instructions is None else f"{row.gate.instructions:g}"
        lines.append(
            f"{row.op:<24} {row.case:<34} {count:>10} {limit:>6} {row.registers:>5} "
            f"{row.gate.registers:>6} {row.spill_bytes:>6}{'  FAILED' if row.faults() else ''}"
        )
    return lines


def widths(compiled, *functions):
    """Bits of the loads and of the stores made from these functions' lines."""
    accesses = compiled.accesses_of(*functions)
    found = [{access.bits for access in accesses if access.is_load == load} for load in (1, 0)]
    assert all(found), "no load or no store: the gate sees nothing"
    return found
