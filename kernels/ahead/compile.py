"""Owns compiling a kernel ahead of time, for a GPU that need not be there, and reading the result.

| read from             | on NVIDIA                        | on AMD               |
|-----------------------|----------------------------------|----------------------|
| registers, spills     | cuobjdump --dump-resource-usage  | assembly's metadata  |
| accesses by line      | nvdisasm --print-line-info       | assembly's .loc      |

Both NVIDIA tools come inside Triton. What counts is the final machine code: PTX is not the last
word on widths. Every access carries the line of the kernel it was made from, so that the accesses
of one path can be told from those of another. Disassembling takes as long as compiling, so it waits
until somebody asks.
"""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS: Mapping[str, GPUTarget] = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 89, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_WORDS = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}
_SASS_ACCESS = re.compile(r"(?:\s|^)(LDG|STG)\.E(?:\.\w+)*")
_SASS_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_AMD_ACCESS = re.compile(r"\s(?:global|flat|buffer)_(load|store)_(\w+?)(?:_d16(?:_hi)?)?\s")
_AMD_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]+)"')
_AMD_LINE = re.compile(r"\.loc\s+(\d+)\s+(\d+)")


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """One instruction that loads from or stores to global memory."""

    is_load: bool
    bits: int
    file: str
    line: int


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of one kernel for one target.

    `spill_bytes` is per thread: stack and local memory on NVIDIA, 4 a spilled register on AMD.
    `code` is a cubin on NVIDIA, the assembly's text on AMD; `ptx` is None there.
    """

    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    intermediate: str
    code: bytes
    ptx: str | None

    @functools.cached_property
    def assembly(self) -> str:
        """The final machine code, as text, with the source line of each instruction."""
        if TARGETS[self.target].backend == "cuda":
            return _with_file(self.code, "nvdisasm", "--print-line-info", "--print-code", "-ndf")
        return self.code.decode()

    @functools.cached_property
    def accesses(self) -> tuple[MemoryAccess, ...]:
        """The accesses to global memory, in the order of the machine code."""
        if TARGETS[self.target].backend == "cuda":
            return _sass_accesses(self.assembly)
        return _amd_accesses(self.assembly)

    def accesses_of(self, *functions: Any) -> tuple[MemoryAccess, ...]:
        """The accesses made from the source lines of these JIT functions."""
        spans = [_span(function) for function in functions]
        return tuple(
            access
            for access in self.accesses
            if any(access.file == file and access.line in lines for file, lines in spans)
        )


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    *,
    num_warps: int,
) -> CompiledKernel:
    """Compile the JIT function `kernel` for `target`, one of `TARGETS`, without fused multiply-add.

    `signature` gives the Triton type of every argument that is not in `constexprs`: "*bf16", say,
    or "i32". Raises `ValueError` for an unknown target; Triton's errors pass through.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    source = ASTSource(
        kernel,
        signature={**signature, **dict.fromkeys(constexprs, "constexpr")},
        constexprs=dict(constexprs),
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=TARGETS[target], options=options)
    if TARGETS[target].backend == "cuda":
        return _read_nvidia(target, made)
    return _read_amd(target, made)


def _span(function: Any) -> tuple[str, range]:
    lines, first = inspect.getsourcelines(function.fn)
    return _place(inspect.getfile(function.fn)), range(first, first + len(lines))


def _place(path: str) -> str:
    """A source file by folder and name, which a compiler's cache keeps when a checkout moves."""
    return "/".join(Path(path).parts[-2:])


def _read_nvidia(target: str, made: Any) -> CompiledKernel:
    usage = _with_file(made.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return CompiledKernel(
        target=target,
        registers=found["REG"],
        spill_bytes=found["STACK"] + found["LOCAL"],
        shared_bytes=made.metadata.shared,
        intermediate=made.asm["ttir"],
        code=made.asm["cubin"],
        ptx=made.asm["ptx"],
    )


def _with_file(cubin: bytes, name: str, *options: str) -> str:
    """What Triton's tool `name` prints about the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(triton.knobs.nvidia, name).path, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _sass_accesses(sass: str) -> tuple[MemoryAccess, ...]:
    accesses: list[MemoryAccess] = []
    file, line = "", 0
    for text in sass.splitlines():
        if at := _SASS_LINE.search(text):
            file, line = _place(at[1]), int(at[2])
        elif access := _SASS_ACCESS.search(text):
            accesses.append(MemoryAccess(access[1] == "LDG", _sass_bits(access[0]), file, line))
    return tuple(accesses)


def _sass_bits(mnemonic: str) -> int:
    """Bits of an access by its suffix: none is 32, .U8 or .S8 is 8, .ENL2.256 is 256."""
    suffixes = [int(found) for found in re.findall(r"\.[US]?(8|16|64|128|256)\b", mnemonic)]
    return suffixes[-1] if suffixes else 32


def _read_amd(target: str, made: Any) -> CompiledKernel:
    assembly = made.asm["amdgcn"]
    spilled = sum(_amd_number(assembly, f"{kind}gpr_spill_count") for kind in "vs")
    return CompiledKernel(
        target=target,
        registers=_amd_number(assembly, "vgpr_count"),
        spill_bytes=4 * spilled,
        shared_bytes=made.metadata.shared,
        intermediate=made.asm["ttir"],
        code=assembly.encode(),
        ptx=None,
    )


def _amd_number(assembly: str, name: str) -> int:
    return max(int(found) for found in re.findall(rf"\.{name}:\s+(\d+)", assembly))


def _amd_accesses(assembly: str) -> tuple[MemoryAccess, ...]:
    files = {
        found[1]: _place(f"{found[2] or ''}/{found[3]}") for found in _AMD_FILE.finditer(assembly)
    }
    accesses: list[MemoryAccess] = []
    file, line = "", 0
    for text in assembly.splitlines():
        if at := _AMD_LINE.search(text):
            file, line = files.get(at[1], ""), int(at[2])
        elif access := _AMD_ACCESS.search(text):
            accesses.append(MemoryAccess(access[1] == "load", _amd_bits(access[2]), file, line))
    return tuple(accesses)


def _amd_bits(suffix: str) -> int:
    """Bits of an access by its suffix: "dwordx4" is 128, "ushort" is 16."""
    word, _, count = suffix.partition("x")
    return _WORDS[word] * int(count or 1)
