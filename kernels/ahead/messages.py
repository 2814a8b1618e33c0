"""The configurations of wire messages: packed, unpacked, summed."""

from __future__ import annotations

from typing import Any

from .. import wide
from ..formats.device_table import codec_of
from ..formats.table import ALIGN_NUMEL, rule_of
from ..wire import (
    pack as message_kernels,
)
from ..wire import sum as sums
from ..wire import (
    tiles as message_tiles,
)
from ..wire import (
    unpack as message_decode,
)
from ..wire.layout import DEFAULT_ROW_NUMEL, layout_of_numel, message_format
from .case import Case, Configuration, element_bytes
from .count import path_cost

KINDS = {"fp32": 0, "bf16": 1, "fp16": 2, "mixed": message_tiles.MIXED}
PACK_COUNTS = ("tiles_at", "num_tiles", "header", "numel", "scales_at", "scales_end", "rows_at",
               "rows_end", "num_bytes")  # fmt: skip
# (format, dtype of the tensors, stochastic). While an H100 moves the bytes of BF16 to MXFP8 there
# is time for 30 instructions an element, to FP4 for 25, from FP32 to FP4 for 45.
PACK = (
    ("fp32", "bf16", False),
    ("bf16", "bf16", False),
    ("bf16", "fp32", False),
    ("bf16", "bf16", True),
    ("fp8_row", "bf16", False),
    ("fp8_1x128", "bf16", False),
    ("fp8_1x128", "bf16", True),
    ("mxfp8", "bf16", False),
    ("mxfp8", "bf16", True),
    ("mxfp4", "bf16", False),
    ("mxfp4", "bf16", True),
    ("mxfp4", "fp32", True),
    ("nvfp4", "bf16", False),
    ("nvfp4", "bf16", True),
    ("nvfp4", "fp32", True),
)
UNPACK = (
    ("fp16", "fp16"),
    *(
        (name, "bf16")
        for name in ("fp32", "bf16", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
    ),
)
PATHS = {"full": (True, False), "masked": (False, True), "both": (True, True)}
WORLD = 8
# (format, dtype of the result), of `WORLD` messages.
REDUCE = (
    ("fp32", "*fp32"),
    ("bf16", "*fp32"),
    ("bf16", "*bf16"),
    ("fp16", "*fp32"),
    ("fp8_row", "*fp32"),
    ("fp8_1x128", "*bf16"),
    ("mxfp8", "*fp32"),
    ("mxfp8", "*bf16"),
    ("mxfp4", "*fp32"),
    ("mxfp4", "*bf16"),
    ("nvfp4", "*fp32"),
    ("nvfp4", "*bf16"),
)
GROUP_NUMEL = 128


def _row_numel(name: str) -> int:
    return DEFAULT_ROW_NUMEL if message_format(name).has_rows else ALIGN_NUMEL


def _options(name: str, kind: str, paths: str, tile: int) -> dict[str, Any]:
    full, masked = PATHS[paths]
    return {
        "CODEC": codec_of(message_format(name), rule_of(message_format(name), "rceil", False)),
        "ROW": _row_numel(name),
        "KIND": KINDS[kind],
        "FULL": full,
        "MASKED": masked,
        "TILE": tile,
        "PART": message_tiles.part_numel(tile, _row_numel(name)),
    }


def pack_configuration(
    name: str, kind: str, stochastic: bool, *, paths: str = "both", scaled: bool = False
) -> Configuration:
    """Tensors of one dtype, or "mixed", into a message."""
    signature = {"message": "*u8", "table": "*i64", **dict.fromkeys(PACK_COUNTS, "i64")}
    tile = message_kernels.tile_numel(message_format(name), stochastic)
    constexprs = _options(name, kind, paths, tile)
    for argument, type_name, is_there in (("scale", "fp32", scaled), ("seed", "i64", stochastic)):
        if is_there:
            signature[argument] = type_name
        else:
            constexprs[argument] = None
    kernel = message_kernels._pack_kernel
    return Configuration(kernel, signature, constexprs, message_tiles.NUM_WARPS)


def unpack_configuration(
    name: str, kind: str, *, paths: str = "both", scaled: bool = False
) -> Configuration:
    """A message into tensors; `scaled`: and added to them."""
    signature = {"message": "*u8", "table": "*i64"}
    signature |= dict.fromkeys(("tiles_at", "scales_at", "rows_at"), "i64")
    constexprs = {"ACCUMULATE": scaled} | _options(name, kind, paths, message_tiles.TILE_NUMEL)
    if scaled:
        signature["scale"] = "fp32"
    else:
        constexprs["scale"] = None
    kernel = message_decode._unpack_kernel
    return Configuration(kernel, signature, constexprs, message_tiles.NUM_WARPS)


def reduce_configuration(name: str, out: str = "*fp32", **changed: Any) -> Configuration:
    """By default of `WORLD` messages in rows, aligned, scaled."""
    form = message_format(name)
    table = changed.get("TABLE", False)
    signature = {"out": out, "messages": "*i64" if table else "*u8", "world": "i32"}
    signature |= dict.fromkeys(("num_bytes", "num_groups", "scales_at", "row_scales_at"), "i64")
    constexprs = {
        "CODEC": codec_of(form),
        "TABLE": table,
        "REST": WORLD - 1,
        "LOOPED": False,
        "SCALED": True,
        "ACCUMULATE": False,
        "ALIGNED": True,
        "GROUPS": sums.tile_groups(form),
    }
    return Configuration(
        sums._reduce_kernel,
        signature | {"row_shift": "i32", "scale": "fp32"},
        constexprs | changed,
        sums.NUM_WARPS,
    )


def message_bytes(name: str) -> float:
    """Bytes an element of a message, scales included, header and gaps not."""
    layout = layout_of_numel(name, DEFAULT_ROW_NUMEL)
    scales = layout.scales_end - layout.scales_at + layout.row_scales_end - layout.row_scales_at
    return (layout.data_bytes + scales) / DEFAULT_ROW_NUMEL


def _reduce_case(op: str, name: str, out: str, configuration: Configuration) -> Case:
    return Case(
        op,
        f"{name} -> {out[1:]} world {WORLD}",
        configuration,
        sums.tile_groups(message_format(name)) * GROUP_NUMEL,
        WORLD * message_bytes(name) + element_bytes(out),
        path_cost,
    )


def cases() -> tuple[Case, ...]:
    """All that have a gate, and sums by addresses, which have none."""
    packed = (
        Case(
            "pack_message_",
            f"{name} from {kind}" + " stochastic" * stochastic,
            pack_configuration(name, kind, stochastic, paths="full"),
            message_kernels.tile_numel(message_format(name), stochastic),
            element_bytes(kind) + message_bytes(name),
            path_cost,
        )
        for name, kind, stochastic in PACK
    )
    unpacked = (
        Case(
            "unpack_message_",
            f"{name} to {kind}",
            unpack_configuration(name, kind, paths="full"),
            message_tiles.TILE_NUMEL,
            message_bytes(name) + element_bytes(kind),
            path_cost,
        )
        for name, kind in UNPACK
    )
    summed = (
        _reduce_case("reduce_messages_", name, out, reduce_configuration(name, out))
        for name, out in REDUCE
    )
    by_addresses = (
        _reduce_case(
            "reduce_peer_messages_", name, out, reduce_configuration(name, out, TABLE=True)
        )
        for name, out in REDUCE
        if out == "*fp32"
    )
    return (*packed, *unpacked, *summed, *by_addresses)


PACK_FUNCTIONS = (message_tiles.loaded, wide.one_access)
"""What loads from the tensors."""
