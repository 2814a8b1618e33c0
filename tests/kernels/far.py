"""Kernel launches whose element counts pass 2**31 while the memory they touch is small."""

import torch

from sidestream.kernels import tables
from sidestream.kernels.pack import kernel as pack

FAR = 2**33  # elements; every product and sum on the way there leaves int32


def pack_far_tile(flat: torch.Tensor, tensor: torch.Tensor, *, unpack: bool) -> None:
    """Move `tensor` from or to `flat[0 : numel]` as the end of one of 2**33 more elements.

    The tensor's address, its offset and its first tile are moved back by as much as its tiles are
    moved forward, so only the real memory is touched - unless an offset was cut to 32 bits.
    """
    tile_bytes, element_bytes = 8192, tensor.element_size()
    (key,) = tables.tensor_keys(flat, [tensor], [0])
    table = tables.tensor_table([key], tile_bytes)
    entries = table.entries
    entries[tables.ADDRESS] -= FAR * element_bytes
    entries[tables.NUMEL] += FAR
    entries[tables.OFFSET] -= FAR
    entries.view(torch.int32)[2 * tables.FIRST_TILE] -= FAR * element_bytes // tile_bytes
    pack._pack_kernel[table.num_tiles,](
        flat,
        entries.to(flat.device),
        table.num_rows,
        None,
        UNPACK=unpack,
        ACCUMULATE=False,
        STEPS=table.search_steps,
        TILE_BYTES=tile_bytes,
        num_warps=8,
    )
