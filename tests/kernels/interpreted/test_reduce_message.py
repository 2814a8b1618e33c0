"""The interpreted sum of wire messages against its definition, bit for bit, canaries included."""

import mmap

import pytest
import torch

from sidestream.kernels.formats.device_table import codec_of
from sidestream.kernels.formats.table import ALIGN_NUMEL, MXFP8, SCALE_RULES
from sidestream.kernels.table_cache import TableCache
from sidestream.kernels.wire import reference as definition
from sidestream.kernels.wire import sum as kernels
from sidestream.kernels.wire.layout import layout_of_bytes, layout_of_numel, message_format
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import sum_cases as cases

FORMAT = pytest.mark.parametrize("format", cases.FORMATS)
MAP_NORESERVE = 0x4000  # Linux: sparse memory may be larger than the machine


def run(messages, format, out_dtype, scale, accumulate, *, row_numel=512, start=0):
    """Rows or a list; the kernel and the definition in memory that goes on on both sides."""
    name = "reduce_peer_messages_" if isinstance(messages, list) else "reduce_messages_"
    numel = layout_of_bytes(format, len(messages[0]), row_numel=row_numel).numel
    results = []
    for module in (kernels, definition):
        around = torch.full((start + numel + 130,), oracle.CANARY, dtype=out_dtype)
        out = around[start : start + numel]
        out.copy_(oracle.values(numel, out_dtype, seed=numel))
        getattr(module, name)(out, messages, format, scale, accumulate, row_numel)
        results.append(around)
    oracle.assert_same_bits(*results)


def tile_numel(format):
    return kernels.tile_groups(message_format(format)) * ALIGN_NUMEL


@FORMAT
def test_worlds(format):
    """A full tile and one that lacks groups; a rank alone, 8, and 9 to 11 by a loop."""
    more = tile_numel(format)
    for step, (world, numel) in enumerate(
        ((1, more + 512), (8, more + 512), (9, 512), (10, 512), (11, 512))
    ):
        messages = cases.random_messages(format, world, numel, 512, seed=world)
        dtype, (scale, accumulate) = oracle.DTYPES[step % 3], cases.MODES[step % 4]
        found = list(messages) if step % 2 else messages
        run(found, format, dtype, scale, accumulate)


@FORMAT
def test_unaligned_memory(format):
    """Messages at any byte, and aligned ones with a result that is not."""
    messages = cases.random_messages(format, 3, 1024, 512)
    for late in (1, 2):
        run(cases.unaligned(messages, late), format, torch.float32, 0.3, True)
    run(cases.scattered(messages), format, torch.bfloat16, 1.0, False, start=1)
    run(messages, format, torch.float32, 1.0, False, start=1)


def test_1024_ranks():
    """340 turns of the loop, by a table."""
    messages = cases.random_messages("fp32", 1024, 128)
    run(list(messages), "fp32", torch.float32, 2.0**-10, False)


@pytest.mark.parametrize("row_numel", [128, 1024, 4096])
@pytest.mark.parametrize("format", ["fp8_row", "nvfp4"])
def test_rows_in_tiles_and_tiles_in_rows(format, row_numel):
    messages = cases.random_messages(format, 2, 8192, row_numel, seed=row_numel)
    run(messages, format, torch.float32, 1.0, False, row_numel=row_numel)


@FORMAT
def test_nothing_to_do_launches_nothing(format):
    messages = cases.random_messages(format, 2, 0)
    run(messages, format, torch.float32, 0.3, True)
    run(list(messages), format, torch.float32, 0.3, True)


def test_messages_beyond_32_bits():
    """Rows of 2**32 bytes, and sections as far apart: sparse memory, of which only pages exist."""
    world, numel, num_bytes, scales_at = 3, 2048, 2**32 + 16, 2**31 + 32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    far = torch.frombuffer(mmap.mmap(-1, world * num_bytes, flags=flags), dtype=torch.uint8)
    layout = layout_of_numel("mxfp8", numel)
    near = cases.random_messages("mxfp8", world, numel)
    for rank, message in enumerate(near):
        start = rank * num_bytes
        far[start : start + layout.scales_at] = message[: layout.scales_at]
        scales = message[layout.scales_at : layout.row_scales_at]
        far[start + scales_at : start + scales_at + len(scales)] = scales
    out, expected = torch.full((numel,), float("nan")), torch.empty(numel)
    kernels._reduce_kernel[1,](
        out,
        far,
        world,
        num_bytes,
        numel // 128,
        scales_at,
        scales_at,
        0,
        None,
        CODEC=codec_of(MXFP8, SCALE_RULES["rceil"]),
        TABLE=False,
        REST=world - 1,
        LOOPED=False,
        ACCUMULATE=False,
        ALIGNED=True,
        HARDWARE=False,
        GROUPS=16,
    )
    definition.reduce_messages_(expected, near, "mxfp8")
    oracle.assert_same_bits(out, expected)


def test_a_table_is_found_again_by_the_addresses(monkeypatch):
    made = TableCache(table_of=kernels._addresses)
    monkeypatch.setattr(kernels, "_tables", made)
    messages = list(cases.random_messages("mxfp4", 3, 512))
    for _ in range(2):
        run(messages, "mxfp4", torch.float32, 1.0, False)
    assert len(made) == 1
    messages[0], messages[1] = messages[1], messages[0].clone()
    run(messages, "mxfp4", torch.float32, 1.0, False)
    assert len(made) == 2
