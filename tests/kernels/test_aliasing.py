"""What an op writes shares memory with nothing else: every pair, and the ways to lie in memory."""

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream import kernels as k
from sidestream.kernels import aliasing
from sidestream.kernels.optim import op as optim_ops
from sidestream.kernels.wire import op as message

E4M3 = torch.float8_e4m3fn


def _flat(numel=256):
    return torch.arange(float(numel))


def _number(value=1.0):
    return torch.tensor(value)


def _shards(names, **given):
    made = {name: torch.ones(32) for name in names.split()}
    return made | {"lr": _number(0.1), "step": _number()} | given


def _adamw(**given):
    k.flat_adamw_(**_shards("param grad exp_avg exp_avg_sq", **given))


def _sgd(**given):
    k.flat_sgd_(momentum=0.9, **_shards("param grad momentum_buffer", **given))


def _messages():
    return torch.zeros(2, k.message_layout("fp32", [128]).num_bytes, dtype=torch.uint8)


MEMORY, BYTES = _flat(), torch.zeros(2048, dtype=torch.uint8)
X, ONE, TABLE, MESSAGES = MEMORY[:64], _number(), torch.ones(3, 4), _messages()
CODES, SCALES = k.quantize_mx(_flat(64))
IN_MESSAGE = MESSAGES[1, 16:].view(torch.float32)
E4M3_SHARD = {"compute": torch.zeros(32, dtype=torch.uint8), "compute_scale": ONE}

OVERLAPS = {
    "cast": (lambda: k.cast(X, "bf16", out=X.view(torch.bfloat16)[64:]), "out", "x"),
    "cast_back": (lambda: k.cast_back(X.view(E4M3)[:64], "e4m3", out=X), "out", "codes"),
    "fp8 codes": (lambda: k.quantize_fp8(X, out=(X.view(E4M3)[:64], ONE)), "out[0]", "x"),
    "fp8 scale": (
        lambda: k.quantize_fp8(X, out=(BYTES[:64].view(E4M3), X[63])), "out[1]", "x"),
    "fp8 parts": (
        lambda: k.quantize_fp8(
            X, out=(BYTES[:64].view(E4M3), BYTES.view(torch.float32)[15])), "out[0]", "out[1]"),
    "delayed": (lambda: k.quantize_fp8(X, scale=ONE, amax=ONE), "amax", "scale"),
    "dequantize_fp8": (
        lambda: k.dequantize_fp8(X.view(E4M3)[:64], ONE, out=X), "out", "codes"),
    "update": (
        lambda: k.update_fp8_scales_(TABLE, TABLE.view(-1)[:3]), "amax_history", "scales"),
    "mx codes": (lambda: k.quantize_mx(X, out=(X.view(E4M3)[:64], SCALES)), "out[0]", "x"),
    "mx parts": (
        lambda: k.quantize_mx(
            X, out=(BYTES[:64].view(E4M3), BYTES[63:65].view(SCALES.dtype))), "out[0]", "out[1]"),
    "dequantize_mx": (
        lambda: k.dequantize_mx(X.view(E4M3)[:64], SCALES, out=X), "out", "data"),
    "pack": (lambda: k.pack_(X, [torch.ones(3), MEMORY[63:65]], [0, 3]), "flat", "tensors[1]"),
    "pack strided": (lambda: k.pack_(MEMORY[9:], [MEMORY[:12:3]], [0]), "flat", "tensors[0]"),
    "pack scalar": (lambda: k.pack_(X, [X[3].expand(5)], [9]), "flat", "tensors[0]"),
    "unpack": (lambda: k.unpack_([MEMORY[60:70]], X, [0]), "flat", "tensors[0]"),
    "unpack twice": (lambda: k.unpack_([X, X[:1]], _flat(), [0, 64]), "tensors[0]", "tensors[1]"),
    "reduce": (lambda: k.reduce_(MEMORY[60:76], X.view(4, 16)), "out", "parts"),
    "pack message": (lambda: k.pack_message_(MESSAGES[1], [IN_MESSAGE], "fp32"),
                     "message", "tensors[0]"),
    "unpack message": (lambda: k.unpack_message_([IN_MESSAGE], MESSAGES[1], "fp32"),
                       "message", "tensors[0]"),
    "unpack message twice": (
        lambda: k.unpack_message_([X, X], MESSAGES[1].repeat(2)[:1040], "fp32", offsets=[0, 128]),
        "tensors[0]", "tensors[1]"),
    "messages": (lambda: k.reduce_messages_(IN_MESSAGE, MESSAGES, "fp32"), "out", "messages"),
    "peers": (lambda: k.reduce_peer_messages_(IN_MESSAGE, [*MESSAGES], "fp32"),
              "out", "messages[1]"),
    "lr": (lambda: _adamw(param=MEMORY[:32], lr=MEMORY[31]), "param", "lr"),
    "halves": (lambda: _adamw(param=MEMORY[:32], grad=MEMORY[31:63]), "param", "grad"),
    "compute": (lambda: _adamw(compute=X.view(torch.bfloat16)[:32], grad=X[:32]),
                "compute", "grad"),
    "amax": (lambda: _adamw(**E4M3_SHARD, amax=ONE), "amax", "compute_scale"),
    "segments": (
        lambda: _adamw(param=X[:32], segments=k.Segments([0], X[:1], torch.ones(1))),
        "param", "segments.lr_scales"),
    "norm": (lambda: k.l2_norm_(X[0], [torch.ones(2), X]), "norm", "tensors[1]"),
    "found_inf": (lambda: k.l2_norm_(ONE, [], found_inf=ONE), "norm", "found_inf"),
    **{
        f"adamw {left} {right}": (
            lambda left=left, right=right: _adamw(**{left: X[:32], right: X[:32]}), left, right)
        for left, right in itertools.combinations(["param", "exp_avg", "exp_avg_sq", "grad"], 2)
    },
    **{
        f"sgd {left} {right}": (
            lambda left=left, right=right: _sgd(**{left: X[:32], right: X[:32]}), left, right)
        for left, right in itertools.combinations(["param", "momentum_buffer", "grad"], 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OVERLAPS)
def test_an_overlap_is_refused_by_both_names_before_anything_is_written(name):
    call, first, second = OVERLAPS[name]
    watched = (MEMORY, BYTES, ONE, TABLE, MESSAGES)
    before = [tensor.clone() for tensor in watched]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == (
        f"{first}: expected memory apart from that of {second}, got an overlap; copy one of the two"
    )
    assert all(map(torch.equal, watched, before))


MATRIX = torch.arange(64.0).view(8, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: k.pack_(MEMORY[64:], [X, MEMORY[:8].view(2, 4)], [0, 64]),
        lambda: k.pack_(MATRIX[1], [MATRIX[::2, :2]], [0]),  # on both sides of it
        lambda: k.pack_(MEMORY[10:], [MEMORY[:12:3]], [0]),  # up to 9
        lambda: k.pack_(_flat(), [X, X], [0, 64]),
        lambda: k.unpack_([MATRIX[:, ::2], MATRIX[:, 1::2]], _flat(), [0, 32]),
        lambda: k.unpack_([MATRIX.t()], _flat(), [0]),
        lambda: k.unpack_([X, X[3:3], X[:0]], _flat(), [0, 0, 0]),
        lambda: k.reduce_(MEMORY[64:80], X.view(4, 16)),
        lambda: k.reduce_peer_messages_(torch.zeros(128), [MESSAGES[0], MESSAGES[0]], "fp32"),
        lambda: k.quantize_fp8(X, scale=X[5]),
        lambda: _adamw(param=MEMORY[:32], grad=MEMORY[32:64], exp_avg=MEMORY[64:96]),
        lambda: _adamw(factor=ONE, lr=ONE),
        lambda: k.l2_norm_(_number(), [X, X]),
    ],
)
def test_neighbours_gaps_and_what_is_read_twice_are_no_overlap(call):
    """An overlap raises."""
    before = [tensor.clone() for tensor in (MEMORY, MATRIX, ONE)]
    call()
    for tensor, old in zip((MEMORY, MATRIX, ONE), before, strict=True):
        tensor.copy_(old)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.zeros(1).expand(5), r"\(0,\)"),
        (torch.zeros(9).as_strided((3, 3), (1, 1)), r"\(1, 1\)"),
        (torch.zeros(9).unfold(0, 3, 2), r"\(2, 1\)"),
    ],
)
def test_memory_that_several_elements_share_is_not_written(tensor, strides):
    message = _messages()[0]
    k.pack_message_(message, [torch.ones(128)], "fp32")
    wanted = rf"tensors\[0\]: expected memory of its own for every element, .* strides {strides}"
    with pytest.raises(ValueError, match=wanted):
        k.unpack_([tensor], torch.ones(128), [0])
    with pytest.raises(ValueError, match=wanted):
        k.unpack_message_([tensor], message, "fp32", offsets=[0])
    assert not tensor.any()
    k.pack_(torch.zeros(128), [tensor], [0])  # it may be read


ROWS, LINE = torch.zeros(6, 6), torch.zeros(40)
MET = {
    "itself": lambda: [LINE[::2], LINE[::2]],
    "columns": lambda: [ROWS[:, :4], ROWS[:, 2:]],
    "diagonal": lambda: [ROWS[:, 0], ROWS.diagonal()],
    "steps of 2 and 3": lambda: [LINE[::2], LINE[::3]],
    "steps of 2 and 3, far": lambda: [(far := torch.zeros(10**6))[::2], far[1::3]],
    "a block and its transpose": lambda: [ROWS[:4, 2:5].t(), ROWS[1:4, 1:3]],
}
APART = {
    "slabs": lambda: [ROWS[:, :3], ROWS[:, 3:]],
    "slabs, transposed": lambda: [ROWS[:, :3].t(), ROWS[:, 3:]],
    "even and odd": lambda: [LINE[::2], LINE[1::2]],
    "a triangle": lambda: [ROWS.diagonal(), ROWS.diagonal(1), ROWS[1:, 0]],
    "slabs of slabs": lambda: [(wide := torch.zeros(9, 40, 80))[:, :20, ::2], wide[:, 20:]],
    "halves of 24 Mi": lambda: torch.zeros(4096, 6144, dtype=torch.bfloat16).split(3072, 1),
    "shuffled": lambda: [torch.zeros(12).as_strided((2, 3), (3, 2))],
}


@pytest.mark.parametrize("name", MET)
def test_tensors_with_gaps_that_meet_are_refused(name):
    tensors = MET[name]()
    wanted = r"tensors\[\d\]: expected memory apart from that of tensors\[\d\], got an overlap"
    flat = torch.ones(sum(tensor.numel() for tensor in tensors))
    with pytest.raises(ValueError, match=wanted):
        k.unpack_(tensors, flat, [0] * len(tensors))
    layout = k.message_layout("fp32", [tensor.numel() for tensor in tensors])
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=wanted):
        k.unpack_message_(tensors, message, "fp32")
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize("name", APART)
def test_tensors_in_the_gaps_of_others_are_written(name):
    tensors = APART[name]()
    flat = torch.ones(sum(tensor.numel() for tensor in tensors))
    k.unpack_(tensors, flat, [0] * len(tensors))
    for tensor in tensors:
        assert tensor.eq(1).all()
        tensor.zero_()


def test_what_would_take_too_long_to_find_out_is_refused(monkeypatch):
    monkeypatch.setattr(aliasing, "_MAX_LOOKS", 1)
    for tensors, wanted in (
        (
            [LINE[:12].as_strided((2, 3), (3, 2))],
            r"tensors\[0\]: .* strides \(3, 2\), of which that",
        ),
        ([ROWS[:, :3], ROWS[:, 3:]], r"tensors\[0\]: .* of tensors\[1\], got strides \(6, 1\) and"),
    ):
        with pytest.raises(ValueError, match=wanted + r".*cannot be told; pass"):
            k.unpack_(tensors, torch.ones(18), [0] * len(tensors))


def _addresses(tensor):
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    size = tensor.element_size()
    return [tensor.data_ptr() + place * size for place in places.view(-1).tolist()]


def test_any_strides_meet_what_their_elements_meet():
    generator = random.Random(3)
    memory = torch.zeros(600, dtype=torch.int16)
    met = 0
    for _ in range(3000):
        dims = range(generator.randrange(5))
        shape = [generator.randint(1, 4) for _ in dims]
        strides = [generator.choice([0, 1, 2, 3, 4, 5, 8, 12, 16, 20]) for _ in dims]
        dtype = generator.choice([torch.int16, torch.float32])
        tensor = memory.view(dtype).as_strided(shape, strides, generator.randrange(50))
        start = generator.randrange(60)
        solid = memory[start : start + generator.randint(1, 30)]
        low, high, size = solid.data_ptr(), solid.data_ptr() + solid.nbytes, tensor.element_size()
        addresses = _addresses(tensor)
        meets = any(low - size < address < high for address in addresses)
        spans = (aliasing._span("solid", solid), aliasing._span("tensor", tensor))
        assert spans[0].meets(spans[1]) == spans[1].meets(spans[0]) == meets, (shape, strides)
        if aliasing._has_own_elements(tensor):
            assert len(set(addresses)) == len(addresses), (shape, strides)
        met += meets
    assert 500 < met < 2500


def test_tensors_with_gaps_meet_where_their_bytes_do():
    """Against sets of addresses: pairs of any strides and of two dtypes, and each of them alone."""
    generator = random.Random(5)
    memory = torch.zeros(2000, dtype=torch.int16)
    met, own = [], []
    for _ in range(3000):
        spans, places = [], []
        for name in ("left", "right"):
            dims = range(generator.randrange(4))
            shape = [generator.randint(1, 4) for _ in dims]
            strides = [generator.choice([0, 2, 3, 4, 5, 8, 12, 24]) for _ in dims]
            dtype = generator.choice([torch.int16, torch.float32])
            tensor = memory.view(dtype).as_strided(shape, strides, generator.randrange(60))
            size, addresses = tensor.element_size(), _addresses(tensor)
            is_own = len(set(addresses)) == len(addresses)
            known = aliasing._has_own_elements(tensor) or aliasing._are_all_apart(tensor)
            assert known is is_own, (shape, strides)
            spans.append(aliasing._span(name, tensor))
            places.append({address + byte for address in addresses for byte in range(size)})
            own.append(is_own)
        meets = not places[0].isdisjoint(places[1])
        assert spans[0].meets(spans[1]) is spans[1].meets(spans[0]) is meets
        met.append(meets)
    assert 300 < sum(met) < 2500
    assert 1000 < sum(own) < 5500


def test_what_has_no_memory_overlaps_nothing():
    """An overlap raises."""
    with FakeTensorMode():
        fake = torch.empty(64)
        k.reduce_(fake[:16], fake.view(4, 16))
        k.unpack_([fake, fake], torch.empty(64), [0, 0])
        k.cast(fake, "bf16", out=fake.view(torch.bfloat16)[:64])
    meta = torch.empty(64, device="meta")
    k.reduce_(meta[:16], meta.view(4, 16))
    k.unpack_([meta, meta], meta, [0, 0])
    k.cast(meta, "bf16", out=meta.view(torch.bfloat16)[:64])
    compiled = torch.func.functionalize(lambda x: k.reduce_(torch.zeros(16), x.view(4, 16)))
    compiled(torch.ones(64))


USUAL = {
    "norm": (
        optim_ops,
        lambda: k.l2_norm_(_number(), [X, X[:3].bfloat16()], found_inf=torch.tensor(False))),
    "pack message": (message, lambda: k.pack_message_(MESSAGES[1].clone(), [X.clone()], "fp32")),
    "unpack message": (message, lambda: k.unpack_message_([X.clone()], MESSAGES[0], "fp32")),
    "peers": (
        message, lambda: k.reduce_peer_messages_(torch.zeros(128), [*MESSAGES], "fp32")),
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_usual_tensors_are_not_looked_at_closely(name, monkeypatch):
    """That takes a host too long."""
    module, call = USUAL[name]
    monkeypatch.setattr(module, "check_device", None)
    call()
