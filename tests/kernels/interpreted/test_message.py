"""The interpreted message kernels against `wire.reference`, bit for bit, canaries included."""

import math
import mmap

import pytest
import torch

from sidestream.kernels import tables
from sidestream.kernels.launch import LaunchConfig
from sidestream.kernels.table_cache import TableCache
from sidestream.kernels.wire import pack, reference, tiles, unpack
from sidestream.kernels.wire.layout import header_bytes, layout_of_numel, message_layout
from sidestream.kernels.wire.reference import MessageCast
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import cases

FORMAT = pytest.mark.parametrize("name", cases.FORMATS)
# Full tiles, a tail, less than a tile, an odd number, none, one; transposed and unaligned ones.
SHAPES = [(8300,), (0,), (33, 77), (), (4096,), (4100,), (5,)]
TRANSPOSED, UNALIGNED = (2,), (5,)
MAP_NORESERVE = 0x4000  # Linux: sparse memory may be larger than the machine
FAR = 2**33  # elements; every product and sum on the way there leaves int32


def given(seed=1):
    return cases.tensors(SHAPES, seed=seed, transposed=TRANSPOSED, unaligned=UNALIGNED)


def check_pack(layout, tensors, **options):
    """The message, or messages, packed by kernel and reference alike."""
    found = cases.packed(pack.pack_message_, layout, tensors, **options)
    expected = cases.packed(reference.pack_message_, layout, tensors, **options)
    margin = options.get("margin", cases.MARGIN)
    found, expected = cases.message_in(found, margin), cases.message_in(expected, margin)
    rows = [memory.view(-1, layout.num_bytes) for memory in (found, expected)]
    for one, other in zip(*rows, strict=True):
        cases.assert_same_messages(one, other, layout)
    return expected if options.get("parts") is None else rows[1]


def check_unpack(layout, message, like, scale=1.0, accumulate=False):
    arguments = (layout, message, like, scale, accumulate)
    found = cases.unpacked(unpack.unpack_message_, *arguments)
    expected = cases.unpacked(reference.unpack_message_, *arguments)
    for one, other in zip(found, expected, strict=True):
        oracle.assert_same_bits(one, other)


@FORMAT
def test_mixed_tensors_in_one_launch(name):
    """NaN, infinity and subnormals among them, in rows of 1024 elements."""
    tensors = given()
    layout = cases.layout_for(name, tensors, 1024)
    check_unpack(layout, check_pack(layout, tensors), tensors)


@FORMAT
def test_scaled_and_accumulated(name):
    """A negative scale, which must not make zeros of the gaps negative ones."""
    tensors = given(seed=20)
    layout = cases.layout_for(name, tensors, 128)
    message = check_pack(layout, tensors, scale=-0.3)
    check_unpack(layout, message, tensors, 0.7, True)


@pytest.mark.parametrize("name", cases.STOCHASTIC)
def test_stochastic(name):
    """From indices beyond 32 bits; one is no multiple of 16, so its full tiles are masked."""
    tensors = given()
    layout = cases.layout_for(name, tensors, 4096)
    indices = [2**33 * index + 16 * index for index in range(len(tensors))]
    indices[4] += 5
    check_pack(layout, tensors, seed=cases.SEED, first_indices=indices, scale=1.25)


def test_stochastic_rounding_knows_no_tiles(monkeypatch):
    tensors = [oracle.values(5000, torch.bfloat16, seed=3)]
    layout = cases.layout_for("mxfp4", tensors, 128)
    expected = check_pack(layout, tensors, seed=cases.SEED)
    monkeypatch.setattr(pack, "config_for", lambda *_: LaunchConfig(1024, 4))
    assert torch.equal(check_pack(layout, tensors, seed=cases.SEED), expected)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_one_dtype_alone(name, dtype):
    """Compiled for that dtype: with only full tiles, or with a tail."""
    tensors = [oracle.values(8192 if dtype is torch.float32 else 8200, dtype, seed=8)]
    layout = cases.layout_for(name, tensors, 4096)
    check_unpack(layout, check_pack(layout, tensors), tensors)


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_rules_of_mx(rule):
    tensors = [oracle.values(4200, torch.float32, seed=5)]
    for name in ("mxfp8", "mxfp4"):
        check_pack(cases.layout_for(name, tensors, 128), tensors, rule=rule)


def test_powers_of_two():
    tensors = [oracle.values(4200, torch.float32, seed=5)]
    for name in ("fp8_row", "fp8_1x128"):
        layout = cases.layout_for(name, tensors, 2048)
        check_pack(layout, tensors, power_of_2=True, seed=3)


@pytest.mark.parametrize("name", ["fp32", "bf16", "nvfp4"])
def test_unaligned_message(name):
    tensors = given()[4:]
    layout = cases.layout_for(name, tensors, 256)
    expected = check_pack(layout, tensors)
    assert torch.equal(check_pack(layout, tensors, margin=33), expected)
    late = torch.empty(layout.num_bytes + 1, dtype=torch.uint8)[1:].copy_(expected)
    check_unpack(layout, late, tensors)


@FORMAT
def test_gaps_before_between_and_after(name):
    """Tensors in another order than their places, and a message that ends with a gap of tiles."""
    tensors = cases.tensors([(1000,), (300,), (0,)])
    layout = cases.layout_for(name, tensors, 128)
    layout = cases.with_offsets(layout, (2048, 256, 0), 4096 + 1024 + 128)
    message = check_pack(layout, tensors)
    check_unpack(layout, message, tensors)


@FORMAT
@pytest.mark.parametrize("numels", [[], [0, 0], [1]], ids=str)
def test_little_or_nothing(name, numels):
    tensors = [torch.ones(numel) for numel in numels]
    layout = cases.layout_for(name, tensors, 128)
    message = check_pack(layout, tensors)
    assert bytes(message[:16].tolist()) == header_bytes(layout)
    check_unpack(layout, message, tensors)


@pytest.mark.parametrize("name", cases.NAN_SCALES)
@pytest.mark.parametrize(("row_numel", "seed"), [(128, cases.SEED), (4096, None)], ids=str)
def test_bad_elements_stay_where_they_are(name, row_numel, seed):
    """First, inner and last ones of blocks, in full tiles and in tails; 3e38 becomes infinite."""
    tensors = list(torch.randn(4, 4700, generator=torch.Generator().manual_seed(2)))
    for tensor, bad in zip(tensors, (math.nan, math.inf, -math.inf, 3e38), strict=True):
        tensor[[0, 1037, 4095, 4699]] = bad
    layout = cases.layout_for(name, tensors, row_numel)
    message = check_pack(layout, tensors, scale=2.0, seed=seed)
    check_unpack(layout, message, tensors)
    values = cases.unpacked(reference.unpack_message_, layout, message, tensors)
    block = cases.block_numel(name, row_numel)
    for made in values:
        is_nan = made.isnan()
        assert is_nan[[0, 1037, 4095, 4699]].all()
        assert is_nan.sum() <= 4 * block
        assert made[~is_nan].isfinite().all()


def test_a_row_without_finite_blocks():
    layout = cases.layout_for("nvfp4", [torch.empty(384)], 128)
    tensor = torch.full((384,), math.inf)
    tensor[130:250], tensor[256:] = 0.0, 1.0
    check_unpack(layout, check_pack(layout, [tensor]), [tensor])


def sparse(numel):
    """Zeros, of which only the pages that are touched exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, numel, flags=flags), dtype=torch.uint8)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_elements_beyond_32_bits(name, monkeypatch):
    """Packed to 2**33 elements and on in a message, as the end of one of 2**33 more elements.

    The tensor's address and first tile are moved back by as much as its tiles are moved forward.
    """
    tensor = oracle.values(5000, torch.bfloat16, seed=1)
    near = message_layout(name, [5000])
    layout = layout_of_numel(name, FAR + near.numel)
    cast = MessageCast(seed=cases.SEED)

    def far_table(pieces, tile_numel):
        table = tiles.piece_table(pieces, tile_numel)
        table.entries[tables.ADDRESS] -= FAR * tensor.element_size()
        table.entries[tables.NUMEL] += FAR
        table.entries[tables.OFFSET] -= FAR
        table.entries[tiles.EXTENT] += FAR
        table.entries.view(torch.int32)[2 * tables.FIRST_TILE] -= FAR // tile_numel
        return table

    (key,) = tiles.packed_pieces([tensor], [0], [0], near).keys
    far = tiles.Pieces(((*key[:2], FAR, *key[3:]),), layout.numel, layout.num_bytes)
    for module in (pack, unpack):
        monkeypatch.setattr(module, "_tables", TableCache(table_of=far_table))
    message = sparse(layout.num_bytes)
    pack._launch(message, far, layout, cast)
    expected = cases.message_in(
        cases.packed(reference.pack_message_, near, [tensor], seed=cases.SEED, first_indices=[FAR])
    )
    ends = [layout.scales_at, layout.row_scales_at, layout.num_bytes]
    near_ends = [near.scales_at, near.row_scales_at, near.num_bytes]
    begins = [near.data_at, near.scales_at, near.row_scales_at]
    for end, near_end, begin in zip(ends, near_ends, begins, strict=True):
        assert torch.equal(message[end - (near_end - begin) : end], expected[begin:near_end])
    assert bytes(message[:16].tolist()) == header_bytes(layout)
    out = torch.full_like(tensor, oracle.CANARY)
    monkeypatch.setattr(unpack, "unpacked_pieces", lambda *_: far_pieces(out, key, layout))
    unpack.unpack_message_([out], message, name, layout.numel, [FAR], 1.0, False, 1024)
    wanted = cases.unpacked(reference.unpack_message_, near, expected, [tensor])[0]
    oracle.assert_same_bits(out, wanted)


def far_pieces(out, key, layout):
    keys = ((out.data_ptr(), out.numel(), FAR, *key[3:5], out.numel(), 0),)
    return tiles.Pieces(keys, layout.numel, layout.num_bytes)


@FORMAT
def test_several_messages_in_one_launch(name):
    """Of full tiles and tails: tensors over several, one without any, and a gap over a cut."""
    numel, offsets, parts = 5120, [0, 20480, 11264, 27648], 7
    tensors = cases.tensors([(8300,), (0,), (91, 83), (600,)], transposed=(2,), unaligned=(3,))
    layout = cases.with_offsets(cases.layout_for(name, [], 1024), offsets, numel)
    noise = {"seed": cases.SEED, "first_indices": [0, 0, 2**33, 5]}
    for options in ({"scale": -0.3}, noise if name in cases.STOCHASTIC else {}):
        messages = check_pack(layout, tensors, parts=parts, **options)
    check_unpack(layout, messages, tensors, 0.7, True)
    check_unpack(cases.with_offsets(layout, [0], numel), messages, [torch.ones(parts * numel)])


def test_messages_beyond_32_bits():
    """The fifth of messages that are longer than 2**30 bytes, and the frames of all."""
    tensor = oracle.values(5000, torch.bfloat16, seed=1)
    near, layout = message_layout("mxfp8", [5000]), layout_of_numel("mxfp8", 2**30)
    messages = sparse(5 * layout.num_bytes).view(5, -1)
    ((address, numel, _, *rest),) = tiles.packed_pieces([tensor], [0], None, near).keys
    place = 4 * layout.numel
    pieces = tiles.Pieces(((address, numel, place, *rest),), layout.numel, layout.num_bytes)
    pack._launch(messages, pieces, layout, MessageCast())
    for message in messages:
        assert bytes(message[:16].tolist()) == header_bytes(layout)
    expected = cases.message_in(cases.packed(reference.pack_message_, near, [tensor]))
    found = messages[4, layout.data_at :][: near.numel]
    assert torch.equal(found, expected[near.data_at : near.scales_at])
    out = torch.full_like(tensor, oracle.CANARY)
    unpack.unpack_message_([out], messages, "mxfp8", layout.numel, [place], 1.0, False, 1024)
    wanted = cases.unpacked(reference.unpack_message_, near, expected, [tensor])[0]
    oracle.assert_same_bits(out, wanted)


def test_tables_are_found_again():
    """Until an address, a size or an index is another."""
    before = len(pack._tables)
    tensors = [torch.ones(200)]
    layout = cases.layout_for("mxfp8", tensors, 128)
    for value in (1.0, 2.0):
        tensors[0].fill_(value)
        check_pack(layout, tensors)
    assert len(pack._tables) == before + 1
    check_pack(layout, tensors, seed=1, first_indices=[16])
    assert len(pack._tables) == before + 2
    for value in (1.0, 2.0):
        tensors[0].fill_(value)
        check_pack(layout, tensors, parts=3)
    assert len(pack._tables) == before + 3
