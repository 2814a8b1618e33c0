"""The sum of wire messages on a CPU: against its definition, by hand, refusals, registration."""

import math
import struct
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels import message_layout, pack_message_, unpack_message_
from sidestream.kernels.pack import reference
from sidestream.kernels.wire import cpu, op
from sidestream.kernels.wire import reference as definition
from sidestream.kernels.wire.layout import header_bytes, layout_of_numel
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import sum_cases as cases

FORMAT = pytest.mark.parametrize("format", cases.FORMATS)
SCALED = pytest.mark.parametrize("format", cases.SCALED)
OUT_DTYPE = pytest.mark.parametrize("out_dtype", oracle.DTYPES, ids=str)
OPS = ("reduce_messages_", "reduce_peer_messages_")


def public(name):
    """The public function, called as the definition is."""

    def call(out, messages, format, scale, accumulate, row_numel):
        if name == "reduce_peer_messages_":
            messages = list(messages)
        options = {"scale": scale, "accumulate": accumulate, "row_numel": row_numel}
        getattr(op, name)(out, messages, format, **options)

    return call


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@FORMAT
def test_sum_of_what_the_references_of_the_formats_decode(format, world):
    for step, (scale, accumulate) in enumerate(cases.MODES):
        messages = cases.random_messages(format, world, 4096, 512, seed=10 * world + step)
        for name in OPS:
            for dtype in oracle.DTYPES:
                options = (scale, accumulate, 512)
                cases.check(public(name), messages, format, dtype, options, start=step)


@FORMAT
def test_what_ranks_pack_is_summed_as_each_of_them_unpacks_it(format):
    generator = torch.Generator().manual_seed(7)
    shapes = [(3, 50), (), (0,), (300,)]
    layout = message_layout(format, [math.prod(shape) for shape in shapes], row_numel=256)
    messages = torch.full((3, layout.num_bytes), 0xAB, dtype=torch.uint8)
    expected = torch.zeros(layout.numel)
    for rank, message in enumerate(messages):
        packed = [torch.randn(shape, generator=generator) for shape in shapes]
        pack_message_(message, packed, format, row_numel=256)
        unpacked = torch.full((layout.numel,), math.nan)
        unpack_message_([unpacked], message, format, offsets=[0], row_numel=256)
        expected = expected + unpacked if rank else unpacked
        for tensor, offset in zip(packed, layout.offsets, strict=True):
            got = unpacked[offset : offset + tensor.numel()].view(tensor.shape)
            torch.testing.assert_close(got, tensor, rtol=0.25, atol=0.4)
    out = torch.full((layout.numel,), math.nan)
    op.reduce_messages_(out, messages, format, row_numel=256)
    assert torch.equal(out, expected)


@FORMAT
def test_1024_ranks(format):
    messages = cases.random_messages(format, 1024, 256, 128)
    for name in OPS:
        cases.check(public(name), messages, format, torch.float32, (2.0**-10, False, 128))


@OUT_DTYPE
@FORMAT
def test_an_element_is_its_code_times_its_scale(format, out_dtype, monkeypatch):
    """By index arithmetic from the layout's definition, amaxes being positive and usual."""
    monkeypatch.setattr(cases, "SPECIAL_SCALES", (1e-20, 1e20))
    messages = cases.random_messages(format, 3, 4096, 256)
    options = (0.3, True, 256)
    decode = cases.element_by_element
    cases.check(public(OPS[0]), messages, format, out_dtype, options, decode=decode)


def message_of(format, numel, data, scales=b"", row_scales=b""):
    """A message put together by hand, from the bytes of its sections: uint8 [1, bytes]."""
    layout = layout_of_numel(format, numel, row_numel=128)
    message = header_bytes(layout)
    for section in (data, scales, row_scales):
        message += section + bytes(-len(section) % 16)
    assert len(message) == layout.num_bytes
    return torch.frombuffer(bytearray(message), dtype=torch.uint8).unsqueeze(0)


# Codes of e4m3: 0x38 is 1, 0x40 is 2, 0xC4 is -3. Of e2m1: 2 is 1, 4 is 2, 0xD is -3, 7 is 6.
E4M3 = bytes([0x38, 0x40, 0xC4]) + bytes(125)
E2M1 = bytes([0x42, 0x7D]) + bytes(62)


@pytest.mark.parametrize(
    ("message", "format", "expected"),
    [
        (message_of("fp32", 128, struct.pack("<3f", 1, 2, -3) + bytes(500)), "fp32", [1, 2, -3]),
        (message_of("bf16", 128, bytes.fromhex("803f 0040 40c0") + bytes(250)), "bf16", [1, 2, -3]),
        (message_of("fp16", 128, struct.pack("<3e", 1, 2, -3) + bytes(250)), "fp16", [1, 2, -3]),
        (
            message_of("fp8_row", 128, E4M3, b"", struct.pack("<f", 0.1)),
            "fp8_row",
            [0.1, 0.2, -0.30000001192092896],
        ),
        (
            message_of("fp8_1x128", 128, E4M3, struct.pack("<f", 0.5)),
            "fp8_1x128",
            [0.5, 1.0, -1.5],
        ),
        (message_of("mxfp8", 128, E4M3, bytes([124, 0, 0, 0])), "mxfp8", [0.125, 0.25, -0.375]),
        (message_of("mxfp4", 128, E2M1, bytes([130, 0, 0, 0])), "mxfp4", [8, 16, -24, 48]),
        # 0x38 is 1: the amax 2688 makes factors of 1.
        (
            message_of("nvfp4", 128, E2M1, bytes([0x38] * 8), struct.pack("<f", 5376)),
            "nvfp4",
            [2, 4, -6, 12],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_golden_messages(message, format, expected):
    out = torch.full((128,), math.nan)
    op.reduce_messages_(out, message, format, row_numel=128)
    wanted = torch.zeros(128)
    wanted[: len(expected)] = torch.tensor(expected)
    oracle.assert_same_bits(out, wanted)
    twice = [message[0], message[0]]
    op.reduce_peer_messages_(out, twice, format, scale=0.5, row_numel=128)
    oracle.assert_same_bits(out, wanted)
    op.reduce_peer_messages_(out, twice, format, scale=0.5, accumulate=True, row_numel=128)
    oracle.assert_same_bits(out, wanted * 2)


def test_ranks_are_added_in_their_order():
    rows = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).unsqueeze(1).repeat(1, 128)
    layout = layout_of_numel("fp32", 128)
    messages = torch.zeros(4, layout.num_bytes, dtype=torch.uint8)
    messages[:, layout.data_at :] = rows.view(torch.uint8)
    out = torch.empty(128)
    for order, expected in (((0, 1, 2, 3), 0.0), ((1, 2, 0, 3), 2.0), ((3, 0, 1, 2), 2.0)):
        op.reduce_messages_(out, messages[list(order)], "fp32")
        assert out.eq(expected).all()
        op.reduce_peer_messages_(out, [messages[rank] for rank in order], "fp32")
        assert out.eq(expected).all()


@pytest.mark.parametrize("row_numel", [128, 256, 512, 1024, 2048, 4096])
@FORMAT
def test_rows_and_chunks(format, row_numel, monkeypatch):
    """Chunks of 4096 elements, the last of 128 or a row."""
    monkeypatch.setattr(cpu, "CHUNK_NUMEL", 4096)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rows = row_numel if format in ("fp8_row", "nvfp4") else 128
    messages = cases.random_messages(format, 2, 2 * 4096 + rows, row_numel, seed=row_numel)
    cases.check(public(OPS[0]), messages, format, torch.bfloat16, (0.3, True, row_numel))


@FORMAT
def test_unaligned_messages_and_results(format):
    messages = cases.random_messages(format, 5, 2048)
    for late in (1, 2, 4, 8):
        found = cases.unaligned(messages, late)
        cases.check(public(OPS[0]), found, format, torch.float16, (0.3, True, 1024), start=1)
    cases.check(public(OPS[1]), cases.scattered(messages), format, torch.float32, (0.3, True, 1024))


NAN_SCALES = {
    "fp8_row": ("row_scales_at", struct.pack("<f", math.nan), 256),
    "fp8_1x128": ("scales_at", struct.pack("<f", math.nan), 128),
    "mxfp8": ("scales_at", b"\xff", 32),
    "mxfp4": ("scales_at", b"\xff", 32),
    "nvfp4": ("scales_at", b"\x7f", 16),
}


@SCALED
def test_a_nan_scale_leaves_its_neighbours_alone(format):
    layout = layout_of_numel(format, 1024, row_numel=256)
    section, nan, block = NAN_SCALES[format]
    at = getattr(layout, section)
    messages = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    size = len(nan)
    data = slice(layout.data_at, layout.data_at + layout.data_bytes)
    generator = torch.Generator().manual_seed(1)
    messages[:, data] = torch.randint(0, 0x70, (3, layout.data_bytes), generator=generator).byte()
    if format == "nvfp4":
        messages[:, layout.scales_at : layout.row_scales_at] = 0x38
    usual = {"fp8_row": 1.0, "fp8_1x128": 1.0, "nvfp4": 2688.0}.get(format)
    if usual is not None:
        last = layout.row_scales_at if format != "fp8_1x128" else layout.scales_at
        count = layout.num_rows or layout.num_scales
        messages[:, last : last + 4 * count] = torch.full((count,), usual).view(torch.uint8)
    else:
        messages[:, at : at + layout.num_scales] = 127
    clean, out = torch.empty(1024), torch.empty(1024)
    op.reduce_messages_(clean, messages, format, row_numel=256)
    assert clean.isfinite().all()
    for index in (0, 1, 1024 // block - 1):
        bad = messages.clone()
        bad[1, at + index * size : at + (index + 1) * size] = torch.frombuffer(
            bytearray(nan), dtype=torch.uint8
        )
        op.reduce_messages_(out, bad, format, row_numel=256)
        affected = torch.zeros(1024, dtype=torch.bool)
        affected[index * block : (index + 1) * block] = True
        assert torch.equal(out.isnan(), affected)
        assert torch.equal(out[~affected], clean[~affected])


@FORMAT
def test_headers_and_padding_are_not_read(format):
    """What is random about the messages' sections stays; all else is changed from poison to 0."""
    numel = 128 * 3
    layout = layout_of_numel(format, numel, row_numel=128)
    messages = cases.random_messages(format, 2, numel, 128)
    changed = messages.clone()
    ends = [
        (0, layout.data_at),
        (layout.data_at + layout.data_bytes, layout.scales_at),
        (layout.scales_end, layout.row_scales_at),
        (layout.row_scales_end, layout.num_bytes),
    ]
    for start, stop in ends:
        changed[:, start:stop] = 0
    assert not torch.equal(changed, messages)
    found = []
    for these in (messages, changed):
        found.append(torch.full((numel,), math.nan))
        op.reduce_messages_(found[-1], these, format, row_numel=128)
    oracle.assert_same_bits(*found)


@FORMAT
def test_empty_messages(format):
    out = torch.empty(0, dtype=torch.bfloat16)
    header = torch.frombuffer(
        bytearray(header_bytes(layout_of_numel(format, 0))), dtype=torch.uint8
    )
    assert len(header) == 16
    op.reduce_messages_(out, header.repeat(3, 1), format)
    op.reduce_peer_messages_(out, [header, header], format, accumulate=True)
    assert out.shape == (0,)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest memory that an operator makes."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.num_bytes = max(self.num_bytes, storage.nbytes())
        return result


@FORMAT
def test_temporaries_are_a_chunk_however_long_the_message(format, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_NUMEL", 4096)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    messages, out = cases.random_messages(format, 3, 32 * 4096), torch.empty(32 * 4096)
    with Largest(messages, out) as largest:
        definition.reduce_messages_(out, messages, format)
    assert 0 < largest.num_bytes <= 4 * 4096


NUM_BYTES = 16 + 256 + 16  # of MXFP8, 256 elements
MESSAGES = torch.zeros(2, NUM_BYTES, dtype=torch.uint8)
BAD_OUTS = [
    (torch.zeros(2, 128), r"out: expected a contiguous 1-D tensor, got shape \(2, 128\)"),
    (torch.zeros(512)[::2], r"out: expected a contiguous 1-D tensor, .*strides \(2,\)"),
    (torch.zeros(256).double(), r"out: expected torch.float32, .*got torch.float64; cast"),
    (torch.zeros(200), r"out: expected a multiple of 128 elements, .*got 200; count the gaps"),
]
BAD_OPTIONS = [
    ({"format": "mxfp6"}, r"format: expected one of fp32, .*got 'mxfp6'; choose"),
    ({"row_numel": 1000}, r"row_numel: expected a power of two from 128 to 4096, got 1000"),
    ({"row_numel": 0}, r"row_numel: expected a power of two from 128 to 4096, got 0"),
    (
        {"format": "nvfp4", "row_numel": 512},
        r"out: expected a multiple of 512 elements, as nvfp4 messages have with row_numel 512",
    ),
]
BAD_MESSAGES = [
    (MESSAGES[:0], r"messages: expected shape \(world, 288\) with world >= 1, got \(0, 288\)"),
    (MESSAGES[0], r"messages: expected shape \(world, 288\) .*got \(288,\); pass one row per rank"),
    (MESSAGES.char(), r"messages: expected torch.uint8, got torch.int8; cast or view"),
    (MESSAGES.to("meta"), r"messages: expected device cpu, got meta; move"),
    (MESSAGES[:, :12], r"messages: expected 288 bytes a message, got 12, too short for the header"),
    (MESSAGES[:, :-1], r"messages: expected 288 bytes a message, mxfp8 of out's 256 .*got 287"),
    (torch.zeros(NUM_BYTES, 2).byte().t(), r"messages: expected a contiguous tensor.*\(1, 2\)"),
]
ROW = MESSAGES[0]
BAD_PEERS = [
    ([], r"messages: expected one or more, got none; pass one message per rank"),
    ([ROW, ROW.char()], r"messages\[1\]: expected torch.uint8, got torch.int8; cast or view"),
    ([ROW, ROW.to("meta")], r"messages\[1\]: expected device cpu, got meta; move"),
    ([ROW, MESSAGES], r"messages\[1\]: expected a contiguous 1-D tensor, got shape \(2, 288\)"),
    ([ROW[:3], ROW], r"messages\[0\]: expected 288 bytes a message, got 3, too short for the head"),
    ([ROW, ROW[:-16]], r"messages\[1\]: expected 288 bytes a message, .*got 272; pass messages"),
    (
        [ROW, torch.zeros(2 * NUM_BYTES).byte()[::2]],
        r"messages\[1\]: expected a contiguous 1-D tensor.*\(2,\)",
    ),
]


def refused(function, message, out, messages, **changed):
    options = {"format": "mxfp8", "row_numel": 128} | changed
    before = out.clone()
    with pytest.raises(ValueError, match=message):
        function(out, messages, options.pop("format"), **options)
    assert torch.equal(out, before)


@pytest.mark.parametrize(("out", "message"), BAD_OUTS, ids=range(len(BAD_OUTS)))
def test_results_that_are_refused(out, message):
    refused(op.reduce_messages_, message, out, MESSAGES)
    refused(op.reduce_peer_messages_, message, out, list(MESSAGES))


@pytest.mark.parametrize(("changed", "message"), BAD_OPTIONS, ids=range(len(BAD_OPTIONS)))
def test_options_that_are_refused(changed, message):
    refused(op.reduce_messages_, message, torch.zeros(256), MESSAGES, **changed)
    refused(op.reduce_peer_messages_, message, torch.zeros(256), list(MESSAGES), **changed)


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_messages_that_are_refused(messages, message):
    refused(op.reduce_messages_, message, torch.zeros(256), messages)


@pytest.mark.parametrize(("messages", "message"), BAD_PEERS, ids=range(len(BAD_PEERS)))
def test_lists_of_messages_that_are_refused(messages, message):
    refused(op.reduce_peer_messages_, message, torch.zeros(256), messages)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_run_and_write_nothing(device):
    with FakeTensorMode():
        out = torch.empty(256, device=device)
        messages = torch.empty(2, NUM_BYTES, device=device, dtype=torch.uint8)
        op.reduce_messages_(out, messages, "mxfp8")
        op.reduce_peer_messages_(out, list(messages), "mxfp8", accumulate=True)
    assert out.shape == (256,)


def test_nothing_is_recorded_for_autograd():
    out = torch.nn.Parameter(torch.ones(256))
    op.reduce_messages_(out, MESSAGES, "mxfp8", accumulate=True)
    op.reduce_peer_messages_(out, list(MESSAGES), "mxfp8", accumulate=True)
    assert out.is_leaf
    assert out.grad_fn is None
    assert out.eq(1.0).all()


def test_the_cpu_path_needs_no_triton():
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "from sidestream.kernels.wire.op import reduce_messages_\n"
        "out = torch.ones(256)\n"
        "reduce_messages_(out, torch.zeros(2, 288, dtype=torch.uint8), 'mxfp8')\n"
        "assert not out.any()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
