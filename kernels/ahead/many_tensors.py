"""The configurations of packing, unpacking and summing: `pack_`, `unpack_`, `reduce_`."""

from __future__ import annotations

from types import ModuleType

from ..pack import kernel as pack
from ..pack import sum as reduce
from .case import Case, Configuration, element_bytes
from .count import costliest_path, wide_path_cost

# (dtype of the flat buffer, accumulated). Tensors may be of any dtype: the table says which.
PACK = (("*fp32", True), ("*bf16", True), ("*fp16", True), ("*bf16", False))
# (dtype of the parts, of the result, world size), all accumulated.
REDUCE = (
    *(("*bf16", "*fp32", world) for world in (2, 8, 64)),
    ("*fp32", "*fp32", 8),
    ("*fp32", "*bf16", 8),
)
TENSOR = "bf16"  # of the tensors, where bytes are counted


def pack_configuration(
    flat: str, *, unpack: bool, accumulate: bool, module: ModuleType = pack
) -> Configuration:
    """Tensors of any dtypes and a flat buffer of `flat`, scaled."""
    config = pack.default_config()
    return Configuration(
        module._pack_kernel,
        {"flat": flat, "table": "*i64", "tiles_at": "i32", "scale": "fp32"},
        {
            "UNPACK": unpack,
            "SCALED": True,
            "ACCUMULATE": accumulate,
            "TILE_BYTES": config.block_bytes,
        },
        config.num_warps,
    )


def reduce_configuration(
    parts: str, out: str, world: int, *, accumulate: bool, module: ModuleType = reduce
) -> Configuration:
    """The sum of `world` aligned parts, scaled."""
    config = reduce.default_config(world)
    return Configuration(
        module._reduce_kernel,
        {"out": out, "parts": parts, "shard": "i32", "scale": "fp32"},
        {
            "WORLD": world,
            "SCALED": True,
            "ACCUMULATE": accumulate,
            "ALIGNED": True,
            "BLOCK": int(config.block_bytes / min(element_bytes(parts), element_bytes(out))),
        },
        config.num_warps,
    )


def pack_functions(module: ModuleType = pack) -> tuple[object, ...]:
    """The functions of full tiles."""
    return (module._move_full_tile,)


def reduce_functions(module: ModuleType = reduce) -> tuple[object, ...]:
    """The functions of full blocks."""
    return (module._reduce_full_block, module._aligned_row)


def _pack_case(flat: str, accumulate: bool, *, unpack: bool) -> Case:
    configuration = pack_configuration(flat, unpack=unpack, accumulate=accumulate)
    written = element_bytes(TENSOR if unpack else flat)
    moved = element_bytes(TENSOR) + element_bytes(flat) + written * accumulate
    return Case(
        "unpack_" if unpack else "pack_",
        flat[1:] + " accumulate" * accumulate,
        configuration,
        int(pack.default_config().block_bytes / element_bytes(TENSOR)),
        moved,
        # Each dtype of tensors has a path, and nothing in the code tells which is whose.
        lambda compiled, _: moved * costliest_path(compiled),
        pack_functions(),
    )


def _reduce_case(parts: str, out: str, world: int) -> Case:
    configuration = reduce_configuration(parts, out, world, accumulate=True)
    return Case(
        "reduce_",
        f"{parts[1:]} -> {out[1:]} world {world}",
        configuration,
        configuration.constexprs["BLOCK"],
        world * element_bytes(parts) + 2 * element_bytes(out),
        wide_path_cost,
        reduce_functions(),
    )


def cases() -> tuple[Case, ...]:
    """All that have a gate."""
    packs = [_pack_case(*case, unpack=unpack) for unpack in (False, True) for case in PACK]
    return (*packs, *(_reduce_case(*case) for case in REDUCE))
