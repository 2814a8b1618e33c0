"""pack_message_ and unpack_message_ on the CPU: the formats' own casts, golden bytes, refusals."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels.wire import cpu
from sidestream.kernels.wire.layout import header_bytes, message_layout, read_header
from sidestream.kernels.wire.op import pack_message_, unpack_message_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import cases
from sidestream.tests.kernels.wire.casts import decoded, encoded

FORMAT = pytest.mark.parametrize("name", cases.FORMATS)
SHAPES = [(300,), (0,), (33, 77), (), (2, 0, 5), (4097,), (128,)]


def given():
    return cases.tensors(SHAPES, transposed=(2,), unaligned=(5,))


def pack(tensors, name, *, row_numel=1024, margin=cases.MARGIN, **options):
    """(Message, layout) by the public function, in poisoned memory."""
    layout = cases.layout_for(name, tensors, row_numel)
    memory = torch.full((layout.num_bytes + 2 * margin,), cases.POISON, dtype=torch.uint8)
    message = memory[margin : len(memory) - margin]
    pack_message_(message, tensors, name, row_numel=row_numel, **options)
    return cases.message_in(memory, margin), layout


def check_message(message, layout, expected):
    """Header, sections and padding, the row scales by their bits."""
    data, scales, rows, padding = cases.sections(message, layout)
    assert bytes(message[:16].tolist()) == header_bytes(layout)
    if layout.format.name in cases.RAW_DTYPES:
        dtype = cases.RAW_DTYPES[layout.format.name]
        oracle.assert_same_bits(data.clone().view(dtype), expected[0].view(dtype))
    else:
        assert torch.equal(data, expected[0])
    assert torch.equal(scales, expected[1].to(torch.uint8))
    oracle.assert_same_bits(rows, expected[2])
    assert not padding.any()


@FORMAT
@pytest.mark.parametrize("row_numel", [128, 1024, 4096])
@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_messages_are_those_of_the_formats_own_casts(name, row_numel, scale):
    """NaN, infinities and subnormals among the values; and back, rounded once to each dtype."""
    tensors = given()
    message, layout = pack(tensors, name, row_numel=row_numel, scale=scale)
    vector = cases.padded(tensors, layout, scale)
    check_message(message, layout, encoded(vector, name, row_numel))
    assert read_header(message, row_numel=row_numel) == (name, layout.numel)
    vector = decoded(message, layout)
    made = [torch.full_like(tensor, oracle.CANARY) for tensor in tensors]
    unpack_message_(made, message, name, row_numel=row_numel)
    for tensor, offset in zip(made, layout.offsets, strict=True):
        values = vector[offset : offset + tensor.numel()].view(tensor.shape)
        oracle.assert_same_bits(tensor, values.to(tensor.dtype))


@pytest.mark.parametrize("name", cases.STOCHASTIC)
@pytest.mark.parametrize("seed", [3, 2**64 - 1, -(2**63)], ids=hex)
def test_stochastic_messages(name, seed):
    """Of the noise of an element's place in the message, unless other indices are given."""
    tensors = given()
    options = {"row_numel": 256, "rounding": "stochastic", "seed": seed}
    message, layout = pack(tensors, name, **options)
    check_message(message, layout, encoded(cases.padded(tensors, layout), name, 256, seed=seed))
    again, _ = pack(tensors, name, first_indices=list(layout.offsets), **options)
    assert torch.equal(message, again)
    nearest, _ = pack(tensors, name, row_numel=256)
    other, _ = pack(tensors, name, row_numel=256, rounding="stochastic", seed=4)
    assert not torch.equal(message, nearest)
    assert not torch.equal(message, other)


@pytest.mark.parametrize("name", cases.STOCHASTIC)
def test_shards_round_as_the_whole_does(name):
    """Parts of a tensor, wherever they come in messages of their own, have the whole's bytes."""
    whole = oracle.values(5000, torch.float32, seed=9)
    whole.nan_to_num_(1.0, 2.0, 3.0)
    options = {"row_numel": 128, "rounding": "stochastic", "seed": cases.SEED}
    expected, layout = pack([whole], name, first_indices=[2**40 + 7], **options)
    parts = list(whole.split((1280, 128, 3592)))
    first = [2**40 + 7, 2**40 + 7 + 1280, 2**40 + 7 + 1408]
    other = torch.ones(77)
    order = [parts[2], other, parts[0], parts[1]]
    indices = [first[2], 5, first[0], first[1]]
    message, placed = pack(order, name, first_indices=indices, **options)
    wanted = decoded(expected, layout)
    found = decoded(message, placed)
    for start, numel, offset in (
        (1408, 3592, placed.offsets[0]),
        (0, 1280, placed.offsets[2]),
        (1280, 128, placed.offsets[3]),
    ):
        oracle.assert_same_bits(found[offset : offset + numel], wanted[start : start + numel])


def test_golden_mxfp8():
    """7 is e4m3's largest, 448, times 2^-6: byte 121; 1 is 64 times that, code 0x68."""
    message, layout = pack([torch.tensor([7.0, -1.0], dtype=torch.bfloat16)], "mxfp8")
    data, scales, _, padding = cases.sections(message, layout)
    assert data[:3].tolist() == [0x7E, 0xE8, 0]
    assert not data[3:].any()
    assert scales.tolist() == [121, 0, 0, 0]
    assert padding.tolist() == [0] * 12


def test_golden_nvfp4():
    """A row of amax 6: its block has scale 448; 3 and -1 are 3/6 and 1/6 of the largest."""
    message, layout = pack([torch.tensor([6.0, 3.0, -1.0])], "nvfp4", row_numel=128)
    data, scales, rows, padding = cases.sections(message, layout)
    assert data[:2].tolist() == [0x57, 0x0A]  # 6 and 3 are codes 7 and 5, -1 is 8 + 2
    assert not data[2:].any()
    assert scales.tolist() == [0x7E, *[0] * 7]
    assert rows.tolist() == [6.0]
    assert len(padding) == 8 + 12
    assert decoded(message, layout)[:4].tolist() == [6.0, 3.0, -1.0, 0.0]


def test_golden_fp8():
    """The stored scale is 1 / (448 / 7); blocks of zeros have 1."""
    tensors = [torch.tensor([7.0, -1.0]), torch.zeros(1)]
    for name, part in (("fp8_1x128", 1), ("fp8_row", 2)):
        message, layout = pack(tensors, name, row_numel=128)
        found = cases.sections(message, layout)
        assert found[0][:3].tolist() == [0x7E, 0xE8, 0]
        inverses = found[part].clone().view(torch.float32)
        assert inverses.tolist() == [2.0**-6, 1.0]


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_rules_of_mx(name, rule):
    tensors = given()
    message, layout = pack(tensors, name, rule=rule)
    check_message(message, layout, encoded(cases.padded(tensors, layout), name, 1024, rule=rule))


@pytest.mark.parametrize("name", ["fp8_row", "fp8_1x128"])
def test_powers_of_two(name):
    tensors = given()
    message, layout = pack(tensors, name, power_of_2=True)
    expected = encoded(cases.padded(tensors, layout), name, 1024, power_of_2=True)
    check_message(message, layout, expected)
    assert not torch.equal(message, pack(tensors, name)[0])


@FORMAT
def test_scale_and_accumulate(name):
    tensors = cases.tensors([(300,), (5, 40), (7,)])
    message, layout = pack(tensors, name, row_numel=128)
    vector = decoded(message, layout) * torch.tensor(0.3)
    old = [torch.randn(tensor.shape).to(tensor.dtype) for tensor in tensors]
    made = [tensor.clone() for tensor in old]
    unpack_message_(made, message, name, row_numel=128, scale=0.3, accumulate=True)
    for tensor, before, offset in zip(made, old, layout.offsets, strict=True):
        values = vector[offset : offset + tensor.numel()].view(tensor.shape)
        oracle.assert_same_bits(tensor, (before.float() + values).to(tensor.dtype))


@FORMAT
def test_unaligned_messages(name):
    tensors = given()
    expected, layout = pack(tensors, name)
    message, _ = pack(tensors, name, margin=33)
    cases.assert_same_messages(message, expected, layout)
    made = [torch.empty_like(tensor) for tensor in tensors]
    wanted = [torch.empty_like(tensor) for tensor in tensors]
    unpack_message_(made, message, name)
    unpack_message_(wanted, expected, name)
    for one, other in zip(made, wanted, strict=True):
        oracle.assert_same_bits(one, other)


@FORMAT
@pytest.mark.parametrize("numels", [[], [0, 0], [1]], ids=str)
def test_little_or_nothing(name, numels):
    tensors = [torch.full((numel,), 2.0) for numel in numels]
    message, layout = pack(tensors, name, row_numel=128)
    assert read_header(message, row_numel=128) == (name, 128 * sum(numels))
    check_message(message, layout, encoded(cases.padded(tensors, layout), name, 128))
    made = [torch.zeros_like(tensor) for tensor in tensors]
    unpack_message_(made, message, name, row_numel=128)
    for tensor in made:
        assert tensor.eq(2.0).all()


@FORMAT
def test_places_of_the_callers_own(name):
    """In any order, with gaps of whole rows; and a part of the tensors taken out again."""
    tensors = cases.tensors([(1000,), (300,), (0,)])
    layout = cases.layout_for(name, tensors, 128)
    layout = cases.with_offsets(layout, (2048, 256, 0), 4096)
    message = torch.full((layout.num_bytes,), cases.POISON, dtype=torch.uint8)
    pack_message_(message, tensors, name, row_numel=128, offsets=layout.offsets)
    check_message(message, layout, encoded(cases.padded(tensors, layout), name, 128))
    one = torch.empty(300)
    unpack_message_([one], message, name, row_numel=128, offsets=[256])
    oracle.assert_same_bits(one, decoded(message, layout)[256:556])


def test_large_messages_are_packed_in_pieces(monkeypatch):
    """Of the same bytes, whatever the length of a piece."""
    tensors = [oracle.values(70000, torch.float32, seed=1), oracle.values(9, torch.float16, seed=2)]
    for name in cases.FORMATS:
        options = {} if name in cases.ALWAYS_NEAREST else {"rounding": "stochastic", "seed": 5}
        expected, _ = pack(tensors, name, **options)
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "CHUNK_NUMEL", 4096)
            assert torch.equal(pack(tensors, name, **options)[0], expected)


ONES = torch.ones(200)
MESSAGE = torch.zeros(message_layout("mxfp8", [200]).num_bytes, dtype=torch.uint8)
NOISY = {"rounding": "stochastic", "seed": 1}
BAD_PACK = {
    "message dtype": ({"message": MESSAGE.int()}, r"message: expected torch\.uint8.*torch\.int32"),
    "message 3-d": ({"message": MESSAGE.view(2, 3, -1)}, r"message: expected a contiguous 1-D ten"),
    "message strides": ({"message": MESSAGE[::2]}, r"message: expected a contiguous 1-D tensor"),
    "short": ({"message": MESSAGE[:-1]}, r"message: expected 288 bytes, mxfp8 of 256.*got 287"),
    "long": ({"message": torch.zeros(304, dtype=torch.uint8)}, r"message: expected 288.*got 304"),
    "dtype": ({"tensors": [ONES, ONES.double()]}, r"tensors\[1\]: expected torch\.fl.*float64"),
    "device": ({"tensors": [ONES.to("meta")]}, r"tensors\[0\]: expected device cpu, got meta"),
    "format": ({"format": "fp8_tensor"}, r"format: expected one of fp32.*got 'fp8_tensor'"),
    "row": ({"row_numel": 1000}, r"row_numel: expected a power of two from 128 to 4096, got 1000"),
    "rule": ({"rule": "round"}, r"rule: expected one of rceil, floor.*got 'round'"),
    "rounding": ({"rounding": "up"}, r"rounding: expected one of nearest, stochastic, got 'up'"),
    "no seed": ({"rounding": "stochastic"}, r"seed: expected an integer with 'stochastic'.*None"),
    "seed": ({"seed": 3}, r"seed: expected None with 'nearest' rounding, got 3"),
    "large seed": ({"rounding": "stochastic", "seed": 2**64}, r"seed: expected -9223.*got 18446"),
    "fp32 stochastic": (
        {"format": "fp32", "rounding": "stochastic", "seed": 1},
        r"rounding: expected nearest for fp32, got 'stochastic'",
    ),
    "indices": (
        {"first_indices": [], **NOISY}, r"first_indices: expected one per tensor, 1, got 0"),
    "index": ({"first_indices": [-1], **NOISY}, r"first_indices\[0\]: expected 0 to .*, got -1"),
    "nearest indices": (
        {"first_indices": [0]}, r"first_indices: expected None with nearest rounding, got a list"),
    "rule of fp8": ({"format": "fp8_1x128", "rule": "even"}, r"rule: expected rceil for fp8_1x128"),
    "powers of mx": ({"power_of_2": True}, r"power_of_2: expected False for mxfp8, got True"),
    "offsets": ({"offsets": [0, 0]}, r"offsets: expected one per tensor, 1, got 2"),
    "offset": ({"offsets": [64]}, r"offsets\[0\]: expected a multiple of 128.*got 64"),
    "negative": ({"offsets": [-128]}, r"offsets\[0\]: expected a multiple of 128.*got -128"),
    "no room": ({"offsets": [128]}, r"offsets\[0\]: .* with room for 200 of 256 .*got 128"),
    "overlap": (
        {"tensors": [ONES, ONES[:9]], "offsets": [0, 128]},
        r"offsets\[1\]: expected 200 or more, where tensors\[0\] ends, got 128",
    ),
    "odd length": (
        {"message": MESSAGE[:17], "offsets": [0]},
        r"message: expected a length that a mxfp8 message can have, .* got 17",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PACK)
def test_bad_packing(case):
    changed, error = BAD_PACK[case]
    arguments = {"message": MESSAGE.clone(), "tensors": [ONES], "format": "mxfp8"} | changed
    before = arguments["message"].clone()
    with pytest.raises(ValueError, match=error):
        pack_message_(**arguments)
    assert torch.equal(arguments["message"], before), "nothing is written"


@pytest.mark.parametrize("case", [
    *("message dtype", "message 3-d", "short", "long", "dtype", "device", "format", "row"),
    *("offsets", "offset", "no room", "overlap", "odd length"),
])  # fmt: skip
def test_bad_unpacking(case):
    changed, error = BAD_PACK[case]
    arguments = {"message": MESSAGE, "tensors": [ONES], "format": "mxfp8"} | changed
    before = [tensor.clone() for tensor in arguments["tensors"]]
    with pytest.raises(ValueError, match=error):
        unpack_message_(**arguments)
    for tensor, kept in zip(arguments["tensors"], before, strict=True):
        assert tensor.device.type == "meta" or torch.equal(tensor, kept)


def test_gradients_are_not_followed():
    weight = torch.ones(200, requires_grad=True)
    message = torch.empty_like(MESSAGE)
    pack_message_(message, [weight], "mxfp8", scale=0.5)
    unpack_message_([weight], message, "mxfp8")
    assert weight.eq(0.5).all()
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_fake_tensors_are_checked_and_stay_as_they_are():
    with FakeTensorMode():
        message, tensor = torch.empty(288, dtype=torch.uint8), torch.empty(200)
        assert pack_message_(message, [tensor], "mxfp8") is None
        assert unpack_message_([tensor], message, "mxfp8", accumulate=True) is None
        assert message.shape == (288,)
        with pytest.raises(ValueError, match="message: expected 288 bytes"):
            pack_message_(message[:-16], [tensor], "mxfp8")
