"""Owns what a configuration of a kernel is, and a case: a configuration that has a name and a cost.

    Configuration   a JIT function with all that a launch would compile it for, but for the target
    Case            a configuration of an op, what it moves and how its instructions are counted

Bytes and instructions are those of one element: of the tensor, or of the result where many become
one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import registry
from ..formats.table import BITS_PER_BYTE, ELEMENT_FORMATS, WIRE_FORMATS
from ..launch import THREADS_PER_WARP
from . import compile as aot

HARDWARE_FP8 = ("sm_90", "sm_100", "sm_120")
_HARDWARE = "HARDWARE"
_BYTES = {
    **{form.name: form.element_bits / BITS_PER_BYTE for form in WIRE_FORMATS},
    **{form.name: form.bits / BITS_PER_BYTE for form in ELEMENT_FORMATS},
}

Counter = Callable[[aot.CompiledKernel, float], float]
"""Instructions an element, from the code and the elements of a thread; raises `CountError`."""


def element_bytes(name: str) -> float:
    """Bytes of an element: of "bf16", "*bf16" or "e2m1", say."""
    return _BYTES[name.removeprefix("*")]


@dataclass(frozen=True)
class Configuration:
    """What one launch compiles: `signature` has the types of what is not in `constexprs`.

    The kernel's argument HARDWARE, whether the GPU converts FP8, follows from the target.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int

    def changed(self, **constexprs: Any) -> Configuration:
        """The same with other constants."""
        return dataclasses.replace(self, constexprs={**self.constexprs, **constexprs})

    def constexprs_for(self, target: str) -> Mapping[str, Any]:
        """All constants for `target`."""
        if _HARDWARE not in self.kernel.arg_names:
            return self.constexprs
        return {**self.constexprs, _HARDWARE: target in HARDWARE_FP8}

    def compile(self, target: str) -> aot.CompiledKernel:
        """The kernel for one of `compile.TARGETS`; raises as `compile.compile_kernel`."""
        constexprs = self.constexprs_for(target)
        return aot.compile_kernel(
            self.kernel, self.signature, constexprs, target, num_warps=self.num_warps
        )


@dataclass(frozen=True)
class Case:
    """A configuration of `op`, what it moves and what the path of full tiles costs.

    numel: elements that a program handles. moved_bytes: of an element, each input and output once.
    count: how instructions are counted, `None` where that path, which nearly all elements take,
    cannot be told apart. functions: the JIT functions whose accesses are those of the path; none
    where the kernel has no other. counted: a kernel of that path alone, whose instructions stand
    for those of the configuration's; registers, spills and memory never do, since a launch needs
    what the costliest path needs.
    """

    op: str
    name: str
    configuration: Configuration
    numel: int
    moved_bytes: float
    count: Counter | None
    functions: tuple[Any, ...] = ()
    counted: Configuration | None = None

    @property
    def elements_per_thread(self) -> float:
        """Elements that a thread handles."""
        return self.numel / (self.configuration.num_warps * THREADS_PER_WARP)

    @property
    def gate(self) -> registry.Gate | None:
        """What the case may cost on sm_90; `None` where nothing is said."""
        gates = {gate.case: gate for gate in registry.row(self.op).gates}
        return gates.get(self.name)

    def instructions(self, compiled: aot.CompiledKernel) -> float | None:
        """Instructions an element; `None` where they cannot be counted."""
        if self.count is None:
            return None
        if self.counted is not None:
            compiled = self.counted.compile(compiled.target)
        return self.count(compiled, self.elements_per_thread)

    def accesses(self, compiled: aot.CompiledKernel) -> tuple[aot.MemoryAccess, ...]:
        """The accesses to global memory on the path of full tiles."""
        return compiled.accesses_of(*self.functions) if self.functions else compiled.accesses
