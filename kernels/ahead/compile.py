"""Compiles what would be launched, for a GPU that need not be there, and reads the result.

| read from          | on NVIDIA                        | on AMD               |
|--------------------|----------------------------------|----------------------|
| registers, spills  | cuobjdump --dump-resource-usage  | assembly's metadata  |
| instructions       | nvdisasm --print-code            | assembly             |

Both NVIDIA tools come inside Triton. What counts is the final machine code: PTX is not the last
word on widths. Disassembling takes as long as compiling, so it waits until somebody asks.

A launch is compiled for the types of its arguments alone. What Triton adds for values that it finds
at a launch, such as multiples of 16, can only make the code shorter.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..launch import HARDWARE, Launch, hardware_of

TARGETS: Mapping[str, GPUTarget] = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 89, 90, 100, 103, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
HARDWARE_OF: Mapping[str, int] = {
    name: hardware_of(divmod(target.arch, 10)) if target.backend == "cuda" else 0
    for name, target in TARGETS.items()
}
"""What HARDWARE is for each target."""

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_INT32 = 1 << 31
_WORDS = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}
# For sm_120 Triton 3.6's disassembler ends an instruction with its waits: `&req={0} ?trans5`.
_SASS = re.compile(
    r"(?P<label>\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;]+?)(?:\s+(?:&\w+=|\?)[^\s;]+)*\s*;"
)
_SASS_BRANCH = re.compile(
    r"(?P<guard>@\S+ )?BRA\S* +(?P<operand>!?U?P\d+, *)?`\((?P<label>\.L_x_\d+)\)"
)
_SASS_ACCESS = re.compile(r"\b(LDG|STG)\.E(?:\.\w+)*")
_SASS_PADDING = re.compile(r"\bNOP\b")
# Nsight Compute, "Kernel Profiling Guide", pipelines, ALU: integers but their products, logic,
# comparisons, moves, and conversions to fewer bits.
_SASS_INTEGER = re.compile(
    r"(?:@\S+ +)?(?:V?I(?:ADD3?|MNMX3?|ABS|SETP)|VIADD(?:MNMX)?|LOP3|LEA|SHF|SGXT|BMSK|PRMT|PLOP3"
    r"|[FI]?SEL|FSETP|FMNMX3?|F2FP|MOV|P2R|R2P)\b"
)
_AMD = re.compile(r"^(?P<label>\.LBB\w+):|^\s+(?P<text>[a-z]+_[a-z0-9_]+[^;]*)")
_AMD_BRANCH = re.compile(r"s_(?:c?branch)(?P<guard>_\w+)?\s+(?P<label>\.LBB\w+)")
_AMD_ACCESS = re.compile(r"(?:global|flat|buffer)_(load|store)_(\w+?)(?:_d16(?:_hi)?)?\s")


@dataclass(frozen=True, slots=True)
class Access:
    """Of an instruction that loads from or stores to global memory."""

    is_load: bool
    bits: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of machine code. jumps_to: the index of another one, where it is a branch;
    goes_on: whether the next one may follow; is_end: the program ends; is_integer: the pipe of
    integers takes it, which NVIDIA's GPUs have, of half the rate at which warps can issue.
    """

    text: str
    access: Access | None = None
    jumps_to: int | None = None
    goes_on: bool = True
    is_end: bool = False
    is_integer: bool = False


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
    def instructions(self) -> tuple[Instruction, ...]:
        """The final machine code, in order, without what pads its end."""
        return instructions_of(self.assembly, TARGETS[self.target].backend)


def compile_launch(launch: Launch, target: str) -> CompiledKernel:
    """Compile for `target`, one of `TARGETS`, without fused multiply-add.

    Raises `ValueError` for an unknown target; Triton's errors pass through.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    signature, constants = specialised(launch, target)
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants)
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=TARGETS[target], options=options)
    return (_read_nvidia if TARGETS[target].backend == "cuda" else _read_amd)(target, made)


def specialised(launch: Launch, target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of all arguments, "constexpr" being that of constants, and the constants."""
    constants = dict(launch.constants)
    constants |= {name: None for name, value in launch.arguments.items() if value is None}
    if HARDWARE in launch.kernel.arg_names:
        constants[HARDWARE] = HARDWARE_OF[target]
    signature = {
        name: "constexpr" if name in constants else type_of(launch.arguments[name])
        for name in launch.kernel.arg_names
    }
    return signature, constants


def type_of(value: object) -> Any:
    """What Triton calls the type of an argument: "*bf16", say, or "i32"; of a tuple, a tuple."""
    if isinstance(value, tuple):
        return tuple(type_of(one) for one in value)
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -_INT32 <= value < _INT32 else "i64"
    return "fp32"


def instructions_of(assembly: str, backend: str) -> tuple[Instruction, ...]:
    """The instructions in the text of machine code for "cuda" or "hip"."""
    pattern = _SASS if backend == "cuda" else _AMD
    texts: list[str] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        found = pattern.search(line)
        if found is None:
            continue
        if found["label"]:
            labels[found["label"]] = len(texts)
        elif not _SASS_PADDING.search(found["text"]):
            texts.append(found["text"].strip())
    read = _sass_instruction if backend == "cuda" else _amd_instruction
    return tuple(read(text, labels) for text in texts)


def _sass_instruction(text: str, labels: Mapping[str, int]) -> Instruction:
    if text == "EXIT":
        return Instruction(text, goes_on=False, is_end=True)
    if branch := _SASS_BRANCH.match(text):
        is_conditional = bool(branch["guard"] or branch["operand"])
        return Instruction(text, jumps_to=labels[branch["label"]], goes_on=is_conditional)
    access = _SASS_ACCESS.search(text)
    return Instruction(
        text,
        access and Access(access[1] == "LDG", _sass_bits(access[0])),
        is_integer=_SASS_INTEGER.match(text) is not None,
    )


def _amd_instruction(text: str, labels: Mapping[str, int]) -> Instruction:
    if text.startswith("s_endpgm"):
        return Instruction(text, goes_on=False, is_end=True)
    if branch := _AMD_BRANCH.match(text):
        return Instruction(
            text, jumps_to=labels[branch["label"]], goes_on=branch["guard"] is not None
        )
    access = _AMD_ACCESS.match(text)
    return Instruction(text, access and Access(access[1] == "load", _amd_bits(access[2])))


def _sass_bits(mnemonic: str) -> int:
    """Bits of an access by its suffix: none is 32, .U8 or .S8 is 8, .ENL2.256 is 256."""
    suffixes = [int(found) for found in re.findall(r"\.[US]?(8|16|64|128|256)\b", mnemonic)]
    return suffixes[-1] if suffixes else 32


def _amd_bits(suffix: str) -> int:
    """Bits of an access by its suffix: "dwordx4" is 128, "ushort" is 16."""
    word, _, count = suffix.partition("x")
    return _WORDS[word] * int(count or 1)


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
