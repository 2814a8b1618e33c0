"""MXFP8 and MXFP4: golden vectors, noise to signal, NaN and infinity, short blocks, refusals."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels.formats import codes, swizzle
from sidestream.kernels.formats.table import BLOCK_FORMATS, E2M1, E8M0, ELEMENTS, SCALE_RULES
from sidestream.kernels.mx.op import dequantize_mx, quantize_mx
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.mx import cases as mx_cases

NAN, INF = math.nan, math.inf
SEED = mx_cases.SEED
ELEMENT = pytest.mark.parametrize("element", mx_cases.ELEMENTS)


def as_bytes(made):
    return [tensor.view(torch.uint8) for tensor in made]


def assert_same(found, expected):
    for one, other in zip(as_bytes(found), as_bytes(expected), strict=True):
        assert torch.equal(one, other)


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("element", "rule", "byte", "expected"),
    [
        # The largest is 7 = 1.75 * 2^2, e4m3's own largest times 2^-6: no rule but even and ceil
        # takes another scale. 7 rounded to a mantissa of 3 bits is 7 still, for even too.
        ("e4m3", "rceil", 121, [448.0, -64.0, 0.0, 1.0, 20.0]),
        ("e4m3", "floor", 121, [448.0, -64.0, 0.0, 1.0, 20.0]),
        ("e4m3", "ceil", 122, [224.0, -32.0, 0.0, 0.5, 10.0]),
        ("e4m3", "even", 121, [448.0, -64.0, 0.0, 1.0, 20.0]),
        # 7 is more than 6: held to 6 by floor's scale of 1, 3.5 -> 4 by the others' of 2.
        ("e2m1", "floor", 127, [6.0, -1.0, 0.0, 0.0, 0.5]),
        ("e2m1", "rceil", 128, [4.0, -0.5, 0.0, 0.0, 0.0]),
        ("e2m1", "even", 128, [4.0, -0.5, 0.0, 0.0, 0.0]),
        ("e5m2", "rceil", 114, [57344.0, -8192.0, 0.0, 128.0, 2560.0]),
    ],
)
def test_golden_vectors(element, rule, byte, expected):
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([7.0, -1.0, 0.0, 2.0**-6, 0.3125])
    data, scales = quantize_mx(x, element=element, rule=rule)
    assert scales.view(torch.uint8).item() == byte
    decoded = dequantize_mx(data, scales, element=element)
    assert (decoded / 2.0 ** (byte - 127))[0, :5].tolist() == expected
    assert not decoded[0, 5:].any()


def test_golden_bytes():
    """The even element has the low nibble: 1, 2, -3, 6 are the codes 2, 4, 13, 7."""
    data, scales = quantize_mx(torch.tensor([1.0, 2.0, -3.0, 6.0, 0.5]), element="e2m1")
    assert data.tolist() == [0x42, 0x7D, 0x01]
    assert scales.view(torch.uint8).tolist() == [127]


# dB, of N(0, 1) and of Student's t with 3 degrees of freedom: a tenth or so below the measured.
BOUNDS = {
    ("e4m3", "rceil"): (31.4, 31.4),
    ("e4m3", "floor"): (30.5, 29.4),
    ("e4m3", "even"): (31.0, 30.4),
    ("e5m2", "rceil"): (25.4, 25.4),
    ("e2m1", "rceil"): (18.7, 16.3),
    ("e2m1", "floor"): (18.7, 16.9),
    ("e2m1", "ceil"): (16.7, 14.0),
    ("e2m1", "even"): (18.9, 17.0),
}


@pytest.mark.parametrize(("element", "rule"), BOUNDS, ids=str)
def test_signal_to_noise(element, rule):
    found = []
    for x in (normal(2**20, seed=3), mx_cases.heavy_tailed(2**20)):
        data, scales = quantize_mx(x, element=element, rule=rule)
        found.append(mx_cases.signal_to_noise(x, dequantize_mx(data, scales, element=element)))
    print(f"{element} {rule}: {found[0]:.2f} dB of N(0, 1), {found[1]:.2f} dB of heavy tails")
    assert found[0] >= BOUNDS[element, rule][0]
    assert found[1] >= BOUNDS[element, rule][1]


@ELEMENT
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_definition_block_by_block(element, rule):
    """Against each block's own scale and codes, in FP64, short ones too."""
    x = oracle.values(7 * 77, torch.float32, seed=5).view(7, 77)
    data, scales = quantize_mx(x, element=element, rule=rule)
    decoded = dequantize_mx(data, scales, element=element, row_numel=77).double()
    form = ELEMENTS[element]
    for row in range(7):
        for column in range(3):
            block = x[row, 32 * column : 32 * column + 32]
            byte = scales.view(torch.uint8)[row, column]
            amax = max(block.abs().tolist(), key=lambda value: INF if value != value else value)
            assert byte == codes.scale_byte(torch.tensor([amax]), form, SCALE_RULES[rule])
            if byte == 255:
                assert decoded[row, 32 * column : 32 * column + 32].isnan().all()
                continue
            power = 2.0 ** (int(byte) - 127)
            wanted = codes.decode(codes.encode((block.double() / power).float(), form), form)
            piece = decoded[row, 32 * column : 32 * column + 32]
            assert torch.equal(piece, (wanted.double() * power).float().double())


@ELEMENT
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=str)
def test_nan_and_infinity_stay_in_their_block(element, bad):
    x = normal(4, 96)
    clean = quantize_mx(x, element=element)
    x[1, 40] = bad
    data, scales = quantize_mx(x, element=element)
    affected = torch.zeros(4, 96, dtype=torch.bool)
    affected[1, 32:64] = True
    decoded = dequantize_mx(data, scales, element=element)
    assert torch.equal(decoded.isnan(), affected)
    assert scales.view(torch.uint8).eq(255).nonzero().tolist() == [[1, 1]]
    expected = dequantize_mx(*clean, element=element)
    assert torch.equal(decoded[~affected], expected[~affected])
    block = data.view(torch.uint8)[1, 16:32] if element == "e2m1" else data.view(torch.uint8)[1]
    assert block[32:64].eq(0x7F).all() if element != "e2m1" else block.eq(0x77).all()


@ELEMENT
def test_what_was_decoded_encodes_to_itself(element):
    """RCEIL: the block's largest keeps its scale, if it is the format's largest."""
    form = ELEMENTS[element]
    finite = torch.arange(1 << form.bits, dtype=torch.uint8)
    values = codes.decode(finite, form)
    values = values[values.isfinite()]
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    blocks = torch.nn.functional.pad(values, (1, 0), value=form.max_finite)
    for power in (-100, -3, 0, 50):
        x = blocks * 2.0**power
        data, scales = quantize_mx(x, element=element)
        assert scales.view(torch.uint8).eq(127 + power).all()
        oracle.assert_same_bits(dequantize_mx(data, scales, element=element), x)


@ELEMENT
def test_every_scale_and_code_decodes_exactly(element):
    """And is rounded once: FP64 has the product, and torch rounds it to FP32, BF16 or FP16."""
    form = ELEMENTS[element]
    every = torch.arange(1 << form.bits, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    columns = -(-every.shape[1] // 32)
    scales = scales.expand(256, columns).contiguous().view(E8M0.dtype)
    values = (
        codes.decode(every, form).double() * torch.exp2(torch.arange(256.0).double() - 127)[:, None]
    )
    values[255] = NAN
    data = codes.pack_nibbles(every) if form is E2M1 else every.view(form.dtype)
    for dtype in oracle.DTYPES:
        found = dequantize_mx(data, scales, element=element, dtype=dtype, row_numel=1 << form.bits)
        oracle.assert_same_bits(found, values.float().to(dtype))


@ELEMENT
@pytest.mark.parametrize("shape", [(64,), (3, 77), (2, 3, 33), (130, 160), (1, 1)], ids=str)
def test_shapes_and_swizzled_scales(element, shape):
    x = oracle.values(torch.Size(shape).numel(), torch.bfloat16, seed=2).view(shape)
    data, scales = quantize_mx(x, element=element)
    found = quantize_mx(x, element=element, swizzled=True)
    wide, blocks = mx_cases.shapes(shape, element, False)
    assert (tuple(data.shape), tuple(scales.shape)) == (wide, blocks)
    assert (data.dtype, scales.dtype) == (ELEMENTS[element].dtype, E8M0.dtype)
    assert_same(found, (data, swizzle.swizzle_scales(scales)))
    options = {"element": element, "row_numel": shape[-1], "dtype": torch.bfloat16}
    plain = dequantize_mx(data, scales, **options)
    assert plain.shape == x.shape
    oracle.assert_same_bits(dequantize_mx(*found, swizzled=True, **options), plain)
    if shape[-1] % 2 and element == "e2m1":
        assert (data[..., -1] >> 4).eq(0).all()
    formats = {"e4m3": "mxfp8", "e2m1": "mxfp4"}
    if element in formats:
        form = next(form for form in BLOCK_FORMATS if form.name == formats[element])
        rows = x.numel() // shape[-1]
        assert data.numel() + scales.numel() == rows * form.num_bytes(shape[-1])


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_empty_tensors(shape, swizzled):
    made = quantize_mx(torch.empty(shape), element="e2m1", swizzled=swizzled)
    assert made[0].numel() == made[1].numel() == 0
    assert dequantize_mx(*made, element="e2m1", swizzled=swizzled).shape == shape


@ELEMENT
def test_noise_depends_on_seed_and_index_alone(element):
    x = normal(48, 64)
    options = {"element": element, "rounding": "stochastic"}
    whole = quantize_mx(x, seed=2**64 - 3, **options)
    assert_same(quantize_mx(x, seed=-3, **options), whole)
    assert_same(quantize_mx(x.view(-1), seed=-3, **options), [made.view(-1) for made in whole])
    for start, stop in ((0, 1), (1, 20), (20, 48)):
        found = quantize_mx(x[start:stop], seed=-3, first_index=64 * start, **options)
        assert_same(found, [made[start:stop] for made in whole])
    other = quantize_mx(x, seed=-4, **options)
    assert (other[0].view(torch.uint8) != whole[0].view(torch.uint8)).float().mean() > 0.1


@ELEMENT
def test_stochastic_rounding_is_unbiased(element):
    """The mean of 512 draws is within 5 sigma of each element; to nearest it is not."""
    row = normal(1, 64, seed=8)
    x = row.expand(512, 64).contiguous()
    data, scales = quantize_mx(x, element=element, rounding="stochastic", seed=SEED)
    drawn = dequantize_mx(data, scales, element=element).double()
    assert drawn.std(0).max() > 0
    assert max(len(column.unique()) for column in drawn.t()) == 2
    step = drawn.amax(0) - drawn.amin(0)
    error = (drawn.mean(0) - row[0].double()).abs()
    assert (error <= 5 * 0.5 * step / math.sqrt(512) + 1e-3 * step + 1e-9).all()
    nearest = dequantize_mx(*quantize_mx(x, element=element), element=element).double()
    assert ((nearest.mean(0) - row[0].double()).abs() > error).float().mean() > 0.7


def test_out_is_written_and_nothing_around_it():
    x = oracle.values(8 * 64, torch.float16, 4).view(8, 64)
    for element in mx_cases.ELEMENTS:
        expected = quantize_mx(x, element=element)
        for swizzled in (False, True):
            parts = [mx_cases.poisoned(s) for s in mx_cases.shapes((8, 64), element, swizzled)]
            dtypes = (ELEMENTS[element].dtype, E8M0.dtype)
            out = tuple(part.view(t) for (part, _), t in zip(parts, dtypes, strict=True))
            made = quantize_mx(x, element=element, swizzled=swizzled, out=out)
            assert made[0] is out[0]
            assert made[1] is out[1]
            scales = swizzle.swizzle_scales(expected[1]) if swizzled else expected[1]
            assert_same(made, (expected[0], scales))
            for _, memory in parts:
                edges = torch.cat((memory[: mx_cases.MARGIN], memory[-mx_cases.MARGIN :]))
                assert edges.eq(mx_cases.POISON).all()
            into = torch.full((8, 64), NAN, dtype=torch.bfloat16)
            decoded = dequantize_mx(*made, element=element, swizzled=swizzled, out=into)
            assert decoded is into
            wanted = dequantize_mx(*expected, element=element, dtype=torch.bfloat16)
            oracle.assert_same_bits(into, wanted)


X = torch.zeros(4, 64)
DATA, SCALES = quantize_mx(X)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"element": "e3m2"}, r"element: expected one of e4m3, e5m2, e2m1, got 'e3m2'"),
        (X, {"rule": "round"}, r"rule: expected one of rceil, .*, got 'round'"),
        (X, {"rounding": "up"}, r"rounding: expected one of nearest, stochastic, got 'up'"),
        (X, {"rounding": "stochastic"}, r"seed: expected an integer with 'stochastic' .* got None"),
        (X, {"seed": 3}, r"seed: expected None with 'nearest' rounding, got 3"),
        (X, {"rounding": "stochastic", "seed": 2**64}, r"seed: expected -9223.* to 1844.*5, got"),
        (X, {"first_index": -1}, r"first_index: expected 0 to .*, got -1"),
        (X.double(), {}, r"x: expected torch.* got torch\.float64"),
        (X.t(), {}, r"x: expected a contiguous tensor.* strides \(1, 64\)"),
        (torch.zeros(()), {}, r"x: expected at least 1 dim.*, got shape \(\); call \.view\(1\)"),
        (X, {"out": (DATA[:3], SCALES)}, r"out\[0\]: expected shape \(4, 64\), got \(3, 64\)"),
        (X, {"out": (DATA, SCALES.view(torch.uint8))}, r"out\[1\]: expected .*e8m0fnu, .*uint8"),
        (X, {"out": (DATA, SCALES), "swizzled": True}, r"out\[1\]: expected shape \(512,\)"),
        (X, {"out": (DATA.to("meta"), SCALES)}, r"out\[0\]: expected device cpu, got meta"),
        (X, {"out": (DATA, SCALES), "element": "e2m1"}, r"out\[0\]: expected torch.uint8"),
    ],
)
def test_quantize_refuses(x, options, message):
    with pytest.raises(ValueError, match=message):
        quantize_mx(x, **options)


@pytest.mark.parametrize(
    ("data", "scales", "options", "message"),
    [
        (DATA, SCALES[:, :1], {}, r"scales: expected shape \(4, 2\), got \(4, 1\)"),
        (DATA, SCALES, {"element": "e5m2"}, r"data: expected .*e5m2, got .*e4m3fn"),
        (DATA, SCALES, {"dtype": torch.int8}, r"dtype: expected one of .* got torch\.int8"),
        (DATA, SCALES, {"row_numel": 63}, r"row_numel: expected 64 to 64, got 63"),
        (DATA, SCALES, {"out": X[:3]}, r"out: expected shape \(4, 64\), got \(3, 64\)"),
        (DATA, SCALES, {"swizzled": True}, r"scales: expected shape \(512,\)"),
        (DATA.flatten()[0], SCALES, {}, r"data: expected at least 1 dimension, got shape \(\)"),
    ],
)
def test_dequantize_refuses(data, scales, options, message):
    with pytest.raises(ValueError, match=message):
        dequantize_mx(data, scales, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_have_the_shapes(device):
    with FakeTensorMode():
        x = torch.empty(5, 70, device=device, dtype=torch.bfloat16)
        data, scales = quantize_mx(x, element="e2m1", swizzled=True)
        decoded = dequantize_mx(data, scales, element="e2m1", row_numel=70, swizzled=True)
    assert (data.shape, scales.shape, decoded.shape) == ((5, 35), (512,), (5, 70))


def test_torch_compile_keeps_the_ops_whole():
    def step(x):
        data, scales = quantize_mx(x * 2, rounding="stochastic", seed=5)
        return dequantize_mx(data, scales) + 1

    torch._dynamo.reset()
    x = normal(8, 64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    oracle.assert_same_bits(compiled(x), step(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_compiled_code(element):
    """Of torch's own compiler, which makes none of E8M0: the ops get scales as bytes."""

    def step(x):
        return dequantize_mx(*quantize_mx(x, element=element), element=element)

    torch._dynamo.reset()
    x = normal(8, 64)
    oracle.assert_same_bits(torch.compile(step, fullgraph=True)(x), step(x))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [None, SEED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("element", "rule"), mx_cases.COMBINATIONS, ids=str)
def test_gpu_and_cpu_agree(element, rule, seed):
    """Each is a kernel of its own, so one dtype each way: test_blocks_on_gpu has the others, and
    swizzled scales."""
    rounding = "nearest" if seed is None else "stochastic"
    options = {"element": element, "rule": rule, "rounding": rounding, "seed": seed}
    for shape in ((300, 256), (130, 77), (5, 4096 + 32)):
        x = oracle.values(torch.Size(shape).numel(), torch.float32, seed=6).view(shape)
        expected = quantize_mx(x, **options)
        found = quantize_mx(x.cuda(), **options)
        assert_same([made.cpu() for made in found], expected)
        decode = {"element": element, "row_numel": shape[-1], "dtype": torch.float16}
        oracle.assert_same_bits(
            dequantize_mx(*found, **decode).cpu(), dequantize_mx(*expected, **decode)
        )
