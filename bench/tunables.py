"""Owns what can be tuned: the cases of ops that a table may have an entry for, and the candidates.

    Tunable     a case as its launcher looks for it, the benchmark's case that times it, and what
                a candidate compiles
    candidates  warps, and blocks of 1, 2 or 4 accesses of 16 bytes a thread; the default first

For kernels that are bound by memory the optimum is flat: bytes in flight decide, and warps times
accesses are those. Where the size of a block is a part of the result, or of a layout, only warps
are candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..kernels import LaunchConfig, tuned
from ..kernels.ahead import Configuration, casts, fp8, many_tensors, messages, mx, optimizers
from ..kernels.ahead import nvfp4 as ahead_nvfp4
from ..kernels.cast import kernel as cast_kernels
from ..kernels.fp8 import kernel as fp8_kernels
from ..kernels.launch import ACCESS_BYTES, THREADS_PER_WARP
from ..kernels.mx import kernel as mx_tiles
from ..kernels.nvfp4 import hadamard
from ..kernels.nvfp4 import kernel as nvfp4
from ..kernels.optim import norm
from ..kernels.optim import tiles as flat_tiles
from ..kernels.pack import kernel as pack
from ..kernels.pack import sum
from ..kernels.wire import (
    pack as message_kernels,
)
from ..kernels.wire import (
    sum as reduce_message_kernels,
)
from ..kernels.wire import (
    tiles as message_tiles,
)
from ..kernels.wire import (
    unpack as message_decode,
)
from ..kernels.wire.layout import message_format
from .kernel_cases.case import Case
from .kernel_cases.selection import all_cases
from .op_names import ops_named

WARPS = (2, 4, 8, 16)
ACCESSES = (1, 2, 4)
FEW_RANKS, MANY_RANKS = 2, 8

Compiled = Callable[[LaunchConfig], Configuration]


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """A case of an op. measured: the name of the benchmark's case; only_warps: blocks are fixed."""

    op: str
    case: str
    measured: str
    default: LaunchConfig
    compiled: Compiled
    only_warps: bool = False

    @property
    def name(self) -> str:
        """For a person."""
        return f"{self.op} {self.case}"

    @property
    def benchmark(self) -> Case:
        """What times it and says what is right."""
        return _benchmarks()[self.measured]

    def candidates(self) -> tuple[LaunchConfig, ...]:
        """The default, then all others that a table may hold, small blocks first."""
        found = {
            config
            for config in _grid(self.default.block_bytes if self.only_warps else None)
            if tuned.illegal(self.op, config) is None
        }
        others = sorted(found - {self.default}, key=size_of)
        return (self.default, *others)


def size_of(config: LaunchConfig) -> tuple[int, int]:
    """What candidates are ordered by."""
    return config.block_bytes, config.num_warps


def _grid(fixed_bytes: int | None) -> Iterator[LaunchConfig]:
    for num_warps in WARPS:
        if fixed_bytes is not None:
            yield LaunchConfig(fixed_bytes, num_warps)
            continue
        for accesses in ACCESSES:
            access_bytes = num_warps * THREADS_PER_WARP * ACCESS_BYTES
            yield LaunchConfig(access_bytes * accesses, num_warps)


@functools.cache
def _benchmarks() -> dict[str, Case]:
    return {case.name: case for case in all_cases()}


def scaled(configuration: Configuration, default: LaunchConfig, *names: str) -> Compiled:
    """`configuration` is the default's; the constants called `names` grow as the block does."""

    def compiled(config: LaunchConfig) -> Configuration:
        constants = {
            name: configuration.constexprs[name] * config.block_bytes // default.block_bytes
            for name in names
        }
        return replace(configuration.changed(**constants), num_warps=config.num_warps)

    return compiled


def select(ops: Iterable[str] | None) -> list[Tunable]:
    """The tunables of the ops called `ops`; None is all.

    Raises:
        UsageError: an op that is not known, or has nothing to tune.
    """
    found = tunables()
    if ops is None:
        return list(found)
    wanted = ops_named(ops, (one.op for one in found))
    return [one for one in found if one.op in wanted]


def tunable(op: str, case: str) -> Tunable:
    """The one for `case` of `op`; `KeyError` if there is none."""
    for one in tunables():
        if (one.op, one.case) == (op, case):
            return one
    raise KeyError(f"{op}: no case {case!r}")


@functools.cache
def tunables() -> tuple[Tunable, ...]:
    """All, in the order of the registry."""
    return (*_many_tensors(), *_casts(), *_fp8(), *_blocks(), *_messages(), *_optimizers())


def _many_tensors() -> Iterator[Tunable]:
    default = pack.default_config()
    packs = (
        ("pack_", "bf16", False, "pack bf16 -> bf16"),
        ("pack_", "fp32", False, "pack bf16 -> fp32"),
        ("pack_", "fp32", True, "pack bf16 -> fp32 accumulate"),
        ("unpack_", "bf16", False, "unpack bf16 -> bf16"),
    )
    for op, flat, accumulate, measured in packs:
        configuration = many_tensors.pack_configuration(
            f"*{flat}", unpack=op == "unpack_", accumulate=accumulate
        )
        yield Tunable(
            op=op,
            case=flat + " accumulate" * accumulate,
            measured=measured,
            default=default,
            compiled=scaled(configuration, default, "TILE_BYTES"),
        )
    for world in (FEW_RANKS, MANY_RANKS):
        configuration = many_tensors.reduce_configuration("*bf16", "*fp32", world, accumulate=False)
        default = sum.default_config(world)
        yield Tunable(
            op="reduce_",
            case=f"bf16 {'few' if world == FEW_RANKS else 'many'} ranks",
            measured=f"reduce world {world} bf16 -> fp32",
            default=default,
            compiled=scaled(configuration, default, "BLOCK"),
        )


def _casts() -> Iterator[Tunable]:
    default = cast_kernels.default_config()
    for source, to, stochastic in (
        ("bf16", "e4m3", False),
        ("bf16", "e2m1", False),
        ("bf16", "e2m1", True),
        ("fp32", "bf16", True),
    ):
        configuration = casts.cast_configuration(to, stochastic, f"*{source}")
        yield Tunable(
            op="cast_",
            case=to + " stochastic" * stochastic,
            measured=f"cast {source} -> {to}" + " SR" * stochastic,
            default=default,
            compiled=scaled(configuration, default, "BLOCK"),
        )
    yield Tunable(
        op="cast_back_",
        case="e4m3",
        measured="cast_back e4m3 -> bf16",
        default=default,
        compiled=scaled(casts.cast_back_configuration("e4m3"), default, "BLOCK"),
    )


def _fp8() -> Iterator[Tunable]:
    default = fp8_kernels.default_config()

    def of_rows(config: LaunchConfig) -> Configuration:
        """The benchmark's rows are a line each."""
        line, _, _, _ = fp8.LINES["rows"]
        configuration = fp8.lines_configuration("rows")
        return replace(
            configuration.changed(COUNT=max(1, config.block_bytes // line)),
            num_warps=min(config.num_warps * max(1, line // config.block_bytes), tuned.MAX_WARPS),
        )

    quantized: dict[str, Compiled] = {
        "tensor": scaled(fp8.known_configuration(False), default, "BLOCK"),
        "row": of_rows,
        "1x128": scaled(fp8.lines_configuration("1x128"), default, "COUNT"),
        "128x128": scaled(fp8.square_configuration(), fp8_kernels.squares_config()),
        "delayed": scaled(fp8.known_configuration(True), default, "BLOCK"),
    }
    for scaling, compiled in quantized.items():
        is_square = scaling == "128x128"
        yield Tunable(
            op="quantize_fp8_",
            case=scaling,
            measured=f"quantize_fp8 {scaling} bf16",
            default=fp8_kernels.squares_config() if is_square else default,
            compiled=compiled,
            only_warps=is_square,
        )
    yield Tunable(
        op="dequantize_fp8_",
        case="1x128",
        measured="dequantize_fp8 1x128 bf16",
        default=default,
        compiled=scaled(fp8.dequantize_configuration("1x128", 128, True), default, "COUNT"),
    )


def _blocks() -> Iterator[Tunable]:
    for element, stochastic in (("e4m3", False), ("e2m1", False), ("e2m1", True)):
        configuration = mx.quantize_configuration(element, stochastic, False)
        yield Tunable(
            op="quantize_mx_",
            case=element + " stochastic" * stochastic,
            measured=f"quantize_mx {element} bf16" + " SR" * stochastic,
            default=mx_tiles.default_config(),
            compiled=scaled(configuration, mx_tiles.default_config()),
            only_warps=True,
        )
    for element in ("e4m3", "e2m1"):
        yield Tunable(
            op="dequantize_mx_",
            case=element,
            measured=f"dequantize_mx {element} bf16",
            default=mx_tiles.default_config(),
            compiled=scaled(mx.dequantize_configuration(element, False), mx_tiles.default_config()),
            only_warps=True,
        )
    yield _of_tiles(
        "amax_nvfp4_", nvfp4.case_of(False), "amax_nvfp4 bf16",
        nvfp4.amax_config(False), ahead_nvfp4.amax_configuration("*bf16", False),
    )  # fmt: skip
    for rotated, stochastic in ((False, False), (True, False), (False, True)):
        yield _of_tiles(
            "quantize_nvfp4_",
            nvfp4.case_of(rotated, stochastic),
            "quantize_nvfp4 bf16" + " hadamard" * rotated + " SR" * stochastic,
            nvfp4.default_config(),
            ahead_nvfp4.quantize_configuration(HADAMARD=rotated, noise=stochastic),
        )
    yield _of_tiles(
        "dequantize_nvfp4_", "bf16", "dequantize_nvfp4 bf16",
        nvfp4.default_config(),
        ahead_nvfp4.dequantize_configuration("*bf16", torchao=False, swizzled=False),
    )  # fmt: skip
    yield _of_tiles(
        "hadamard16_", "bf16", "hadamard16 bf16",
        hadamard.default_config(2), ahead_nvfp4.hadamard_configuration("*bf16", False),
    )  # fmt: skip


def _of_tiles(
    op: str,
    case: str,
    measured: str,
    default: LaunchConfig,
    configuration: Configuration,
    block: str = "TILE",
) -> Tunable:
    """One whose kernel knows its block by one constant alone."""
    compiled = scaled(configuration, default, block)
    return Tunable(op=op, case=case, measured=measured, default=default, compiled=compiled)


def _messages() -> Iterator[Tunable]:
    for form in ("bf16", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"):
        yield Tunable(
            op="pack_message_",
            case=form,
            measured=f"pack_message bf16 -> {form}",
            default=message_kernels.default_config(message_format(form), False),
            compiled=_with_parts(messages.pack_configuration(form, "bf16", False)),
        )
    yield Tunable(
        op="unpack_message_",
        case="mxfp8",
        measured="unpack_message mxfp8 -> bf16",
        default=message_decode.default_config(),
        compiled=_with_parts(messages.unpack_configuration("mxfp8", "bf16")),
    )
    sums = [("reduce_messages_", form) for form in ("bf16", "fp8_row", "mxfp8", "mxfp4", "nvfp4")]
    for op, form in (*sums, ("reduce_peer_messages_", "mxfp8")):
        default = reduce_message_kernels.default_config(message_format(form))
        configuration = messages.reduce_configuration(form, TABLE=op == "reduce_peer_messages_")
        yield Tunable(
            op=op,
            case=form,
            measured=f"{op.rstrip('_')} world {MANY_RANKS} {form}",
            default=default,
            compiled=scaled(configuration, default, "GROUPS"),
        )


def _with_parts(configuration: Configuration) -> Compiled:
    """The masked path's parts follow from the tile."""

    def compiled(config: LaunchConfig) -> Configuration:
        tile = config.block_bytes
        parts = message_tiles.part_numel(tile, configuration.constexprs["ROW"])
        return replace(configuration.changed(TILE=tile, PART=parts), num_warps=config.num_warps)

    return compiled


def _optimizers() -> Iterator[Tunable]:
    default = flat_tiles.default_config()
    for op, grad, compute in (
        ("adamw", "fp32", None),
        ("adamw", "bf16", "bf16"),
        ("sgd", "bf16", "bf16"),
    ):
        configuration = optimizers.optimizer_configuration(
            op, f"*{grad}", f"*{compute}" if compute else None, segments=False
        )
        case = f"{grad} -> {compute or 'none'}"
        yield Tunable(
            op=f"flat_{op}_",
            case=case,
            measured=f"{'adamw' if op == 'adamw' else 'sgd momentum'} {case}",
            default=default,
            compiled=scaled(configuration, default, "BLOCK"),
        )
    for dtype in ("fp32", "bf16"):
        yield Tunable(
            op="l2_norm_",
            case=dtype,
            measured=f"l2_norm {dtype}",
            default=norm.default_config(),
            compiled=scaled(optimizers.chunk_configuration(), norm.default_config()),
            only_warps=True,
        )
