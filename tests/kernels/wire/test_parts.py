"""Several messages in one call: each has the bits of its slices packed alone; and back again."""

import pytest
import torch

from sidestream.kernels.wire.layout import layout_of_numel, message_layout
from sidestream.kernels.wire.op import pack_message_, unpack_message_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import cases

FORMAT = pytest.mark.parametrize("name", cases.FORMATS)
PART = 1024
ROWS = 256
# In messages of 1024: one in the first alone, one in three, nothing, one up to a cut, one after it.
SHAPES = [(300,), (41, 50), (0,), (512,), (7,)]
OFFSETS = [0, 512, 4096, 3584, 4608]
INDICES = [5, 2**33, 0, 7, 16]
PARTS = 6  # the last one has nothing at all
TRANSPOSED, UNALIGNED = (1,), (3,)
OPTIONS = {
    "nearest": {"scale": -0.3},
    "stochastic": {"rounding": "stochastic", "seed": cases.SEED, "first_indices": INDICES},
}


def given():
    return cases.tensors(SHAPES, transposed=TRANSPOSED, unaligned=UNALIGNED)


def poisoned(parts, name, numel=PART, row_numel=ROWS):
    num_bytes = layout_of_numel(name, numel, row_numel=row_numel).num_bytes
    return torch.full((parts, num_bytes), cases.POISON, dtype=torch.uint8)


def packed_alone(tensors, name, rounding):
    """Message by message, each of copies of what lies in it, found by an element's place."""
    options = dict(OPTIONS[rounding])
    indices = options.pop("first_indices", OFFSETS)
    messages = poisoned(PARTS, name)
    for number, message in enumerate(messages):
        slices, offsets, firsts = [], [], []
        for tensor, offset, index in zip(tensors, OFFSETS, indices, strict=True):
            places = offset + torch.arange(tensor.numel())
            here = places // PART == number
            if here.any():
                slices.append(tensor.reshape(-1)[here].clone())
                offsets.append(int(places[here][0]) % PART)
                firsts.append(index + int(here.int().argmax()))
        noise = {"first_indices": firsts} if rounding == "stochastic" else {}
        pack_message_(message, slices, name, offsets=offsets, row_numel=ROWS, **options, **noise)
    return messages


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        *((name, "nearest") for name in cases.FORMATS),
        *((name, "stochastic") for name in cases.STOCHASTIC),
    ],
)
def test_each_is_what_packing_its_slices_makes(name, rounding):
    tensors = given()
    messages = poisoned(PARTS, name)
    pack_message_(messages, tensors, name, offsets=OFFSETS, row_numel=ROWS, **OPTIONS[rounding])
    assert torch.equal(messages, packed_alone(tensors, name, rounding))


@FORMAT
@pytest.mark.parametrize("accumulate", [False, True], ids=["filled", "accumulated"])
def test_and_back(name, accumulate):
    """A flat buffer of all, and tensors that begin in one message and end in another."""
    messages = poisoned(PARTS, name)
    pack_message_(messages, given(), name, offsets=OFFSETS, row_numel=ROWS)
    options = {"row_numel": ROWS, "scale": 0.7, "accumulate": accumulate}
    old = torch.randn(PARTS * PART)
    flat, wanted = old.clone(), old.clone()
    for message, part in zip(messages, wanted.split(PART), strict=True):
        unpack_message_([part], message, name, offsets=[0], **options)
    unpack_message_([flat], messages, name, **options)
    oracle.assert_same_bits(flat, wanted)
    made = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in given()]
    for tensor, offset in zip(made, OFFSETS, strict=True):
        tensor.copy_(old[offset : offset + tensor.numel()].view(tensor.shape))
    unpack_message_(made, messages, name, offsets=OFFSETS, **options)
    for tensor, offset in zip(made, OFFSETS, strict=True):
        oracle.assert_same_bits(tensor.reshape(-1), wanted[offset : offset + tensor.numel()])


@FORMAT
def test_one_part_is_the_message(name):
    tensors = given()
    layout = message_layout(name, [tensor.numel() for tensor in tensors], row_numel=ROWS, parts=1)
    one, row = poisoned(2, name, layout.numel).unbind()
    pack_message_(one, tensors, name, row_numel=ROWS)
    pack_message_(row.view(1, -1), tensors, name, row_numel=ROWS)
    assert torch.equal(one, row)
    made, wanted = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(2))
    unpack_message_(made, row.view(1, -1), name, row_numel=ROWS)
    unpack_message_(wanted, one, name, row_numel=ROWS)
    for tensor, like in zip(made, wanted, strict=True):
        oracle.assert_same_bits(tensor, like)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("numels", [[], [0], [1], [300, 0, 5000]], ids=str)
def test_messages_are_as_short_as_tensors_allow(numels, parts):
    """More parts than there are blocks leave some without any element, gaps alone."""
    layout = message_layout("mxfp8", numels, parts=parts)
    assert layout.offsets == message_layout("mxfp8", numels).offsets
    whole = message_layout("mxfp8", numels).numel
    assert layout.numel % layout.align_numel == 0
    assert parts * layout.numel >= whole > parts * (layout.numel - layout.align_numel) or not whole
    tensors = [torch.full((numel,), 2.0) for numel in numels]
    messages = poisoned(parts, "mxfp8", layout.numel)
    pack_message_(messages, tensors, "mxfp8")
    made = [torch.zeros_like(tensor) for tensor in tensors]
    unpack_message_(made, messages, "mxfp8")
    for tensor in made:
        assert tensor.eq(2.0).all()


@pytest.mark.parametrize("name", ["fp32", "nvfp4"])
def test_messages_that_are_not_aligned(name):
    tensors = given()
    expected = poisoned(PARTS, name)
    pack_message_(expected, tensors, name, offsets=OFFSETS, row_numel=ROWS)
    late = torch.zeros(expected.numel() + 1, dtype=torch.uint8)[1:].view(expected.shape)
    pack_message_(late, tensors, name, offsets=OFFSETS, row_numel=ROWS)
    assert torch.equal(late, expected)
    flat, wanted = torch.zeros(2, PARTS * PART).unbind()
    unpack_message_([flat], late, name, row_numel=ROWS)
    unpack_message_([wanted], expected, name, row_numel=ROWS)
    oracle.assert_same_bits(flat, wanted)


ONES = torch.ones(512)
MESSAGES = torch.zeros(4, message_layout("mxfp8", [128]).num_bytes, dtype=torch.uint8)
BAD = {
    "no part": ({"message": MESSAGES[:0]}, r"message: expected a contiguous 1-D.*shape \(0, 160\)"),
    "gaps between": ({"message": MESSAGES[::2]}, r"message: .* a row for each message, .*\(2, 16"),
    "short": ({"message": MESSAGES[:3]}, r"message: expected 288 bytes a row, mxfp8 of 256.*t 160"),
    "length": (
        {"message": MESSAGES.view(2, -1), "offsets": [0]},
        r"message: expected a length that a mxfp8 message can have, .* got 320 bytes",
    ),
    "no room": (
        {"offsets": [128]}, r"offsets\[0\]: expected a .* room for 512 of 512 elements, got 128"),
    "overlap": (
        {"tensors": [ONES[:300], ONES[:9]], "offsets": [0, 256]},
        r"offsets\[1\]: expected 300 or more, where tensors\[0\] ends, got 256",
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", ["pack", "unpack"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_writes_nothing(case, function):
    changed, error = BAD[case]
    arguments = {"message": MESSAGES.clone(), "tensors": [ONES], "format": "mxfp8"} | changed
    before = [one.clone() for one in (arguments["message"], *arguments["tensors"])]
    call = pack_message_ if function == "pack" else unpack_message_
    with pytest.raises(ValueError, match=error):
        call(**arguments)
    for one, kept in zip((arguments["message"], *arguments["tensors"]), before, strict=True):
        assert torch.equal(one, kept)


def test_indices_go_on_over_all_parts():
    last = 2**63 - 1 - 4 * 128
    noise = {"rounding": "stochastic", "seed": 1}
    pack_message_(MESSAGES.clone(), [ONES], "mxfp8", first_indices=[last], **noise)
    with pytest.raises(ValueError, match=rf"first_indices\[0\]: expected 0 to {last}, got"):
        pack_message_(MESSAGES.clone(), [ONES], "mxfp8", first_indices=[last + 1], **noise)
