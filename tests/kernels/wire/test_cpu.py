"""Messages on a CPU have the bits of `reference`, whatever is in them and wherever it lies."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from sidestream.kernels.formats.noise import noise_bits
from sidestream.kernels.wire import cpu, reference
from sidestream.kernels.wire.layout import layout_of_numel
from sidestream.kernels.wire.reference import MessageCast
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.wire import cases
from sidestream.tests.kernels.wire.test_sum_op import Largest

FORMAT = pytest.mark.parametrize("name", cases.FORMATS)
CHUNK = 4096
OPTIONS = {
    "nearest": {},
    "scaled": {"scale": -0.3},
    "even": {"rule": "even"},
    "floor": {"rule": "floor"},
    "power of 2": {"power_of_2": True},
    "noise": {"seed": cases.SEED},
    "scaled noise": {"seed": 5, "scale": 3.0},
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(cpu, "CHUNK_NUMEL", CHUNK)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def any_bits(numel, seed):
    """FP32 of random bits: every exponent, subnormals, infinities and NaNs of both signs."""
    values = noise_bits(seed, 0, numel).view(torch.float32).clone()
    values[numel // 2 :].nan_to_num_(0.5, 2.0, -0.0)  # and blocks that are finite
    return values


def both(tensors, layout, indices=None, margin=cases.MARGIN, **options):
    """The same packing by both, compared; the message."""
    found, expected = (
        cases.packed(
            module.pack_message_, layout, tensors, first_indices=indices, margin=margin, **options
        )
        for module in (cpu, reference)
    )
    assert found[:margin].eq(cases.POISON).all()
    assert found[len(found) - margin :].eq(cases.POISON).all()
    message = found[margin : len(found) - margin]
    cases.assert_same_messages(message, expected[margin : len(expected) - margin], layout)
    return message


def unpacked(module, layout, message, tensors, scale, accumulate):
    made = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    arguments = layout.format.name, layout.numel, layout.offsets
    module.unpack_message_(made, message, *arguments, scale, accumulate, layout.row_numel)
    return made


@FORMAT
@pytest.mark.parametrize("options", OPTIONS)
def test_packed(name, options):
    """Chunks of one tensor alone, with ends and starts of others, and of nothing."""
    given = dict(OPTIONS[options])
    if "seed" in given and name in cases.ALWAYS_NEAREST:
        pytest.skip("always to nearest")
    sizes = (3 * CHUNK + 77, 5, 200, CHUNK + 1)
    tensors = [any_bits(size, seed) for seed, size in enumerate(sizes)]
    tensors[1], tensors[2] = tensors[1].half(), tensors[2].bfloat16().view(10, 20).t()
    layout = layout_of_numel(name, 8 * CHUNK + 1024, row_numel=256)
    layout = dataclasses.replace(layout, offsets=(512, 5 * CHUNK - 256, 0, 6 * CHUNK - 1024))
    for indices in (None, [2**36 - 40, 16, 2**63 - 2**20, 7]):
        both(tensors, layout, indices, **given)
    both(tensors, layout, margin=33, **given)


@FORMAT
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=15, deadline=None)
def test_packed_and_unpacked_anyhow(name, data):
    row_numel = data.draw(st.sampled_from([128, 512, 4096]))
    numels = data.draw(st.lists(st.integers(0, 6000), max_size=4))
    tensors = cases.tensors([(numel,) for numel in numels], seed=data.draw(st.integers(0, 99)))
    layout = cases.layout_for(name, tensors, row_numel)
    noise = name in cases.STOCHASTIC and data.draw(st.booleans())
    scale = data.draw(st.sampled_from([1.0, -2.5]))
    message = both(tensors, layout, scale=scale, **({"seed": 9} if noise else {}))
    accumulate = data.draw(st.booleans())
    sets = [unpacked(m, layout, message, tensors, scale, accumulate) for m in (cpu, reference)]
    for one, other in zip(*sets, strict=True):
        oracle.assert_same_bits(one, other)


@FORMAT
@pytest.mark.parametrize("accumulate", [False, True], ids=["filled", "accumulated"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_any_bytes_unpacked_and_summed(name, accumulate, late):
    """Every code and every scale, NaNs among them, into memory that begins anywhere."""
    numel = 2 * CHUNK + 1024
    layout = layout_of_numel(name, numel, row_numel=512)
    words = noise_bits(late + 3, 0, 3 * layout.num_bytes // 4)
    messages = words.view(torch.uint8).view(3, layout.num_bytes)
    messages[1, layout.data_at : layout.scales_at].clamp_max_(0x70)  # not a NaN
    layout = dataclasses.replace(layout, offsets=(0,))
    for scale in (1.0, -0.3):
        for dtype in oracle.DTYPES:
            old = torch.randn(numel + late).to(dtype)[late:]
            made = [
                unpacked(module, layout, messages[1], [old], scale, accumulate)
                for module in (cpu, reference)
            ]
            oracle.assert_same_bits(made[0][0], made[1][0])
            for world in (1, 2, 3):
                sums = []
                for module in (cpu, reference):
                    out = torch.empty(numel + late, dtype=dtype)[late:].copy_(old)
                    options = (scale, accumulate, 512)
                    module.reduce_messages_(out, messages[:world], name, *options)
                    sums.append(out)
                oracle.assert_same_bits(*sums)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_subnormals_where_the_processor_has_none(name):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        tensors = [any_bits(CHUNK, 1) * 2.0**-120, torch.randn(3000) * 2.0**-130]
        layout = cases.layout_for(name, tensors, 1024)
        for options in ({}, {"seed": 4}):
            message = both(tensors, layout, **options)
            sets = [unpacked(m, layout, message, tensors, 1.0, False) for m in (cpu, reference)]
            for one, other in zip(*sets, strict=True):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", cases.STOCHASTIC)
def test_memory_is_that_of_a_chunk_however_long_the_message(name, monkeypatch):
    """The largest are the indices of a look-up, 8 bytes an element; tables are made before."""
    chunk = 4 * CHUNK
    monkeypatch.setattr(cpu, "CHUNK_NUMEL", chunk)
    assert _largest(name, chunk) > 0
    assert _largest(name, 8 * chunk) <= 8 * chunk


def _largest(name, numel):
    tensor, out = torch.randn(numel), torch.empty(numel)
    messages = torch.empty(2, layout_of_numel(name, numel).num_bytes, dtype=torch.uint8)
    cast = dataclasses.astuple(MessageCast(seed=3))
    with Largest(tensor, out, messages) as largest:
        cpu.pack_message_(messages[0], [tensor], name, numel, [0], [0], *cast)
        messages[1] = messages[0]
        cpu.unpack_message_([out], messages[0], name, numel, [0], 1.0, False, 1024)
        cpu.reduce_messages_(out, messages, name)
    return largest.num_bytes
