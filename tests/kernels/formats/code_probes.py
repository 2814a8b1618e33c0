"""Small kernels around the functions of `device_codes`, to interpret and to compile."""

import triton
import triton.language as tl

from sidestream.kernels.formats import device_codes as device
from sidestream.kernels.formats.device_e2m1 import packed_e2m1, unpacked_e2m1


@triton.jit
def encode_probe(
    values,
    found,
    noise,
    seed,
    first,
    ELEMENT: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of `found`: codes to nearest, then stochastically if there are; noise of `first` on."""
    lanes = tl.arange(0, BLOCK)
    x = tl.load(values + lanes)
    bits = device.noise_of(seed, first + lanes)
    tl.store(noise + lanes, bits.to(tl.int32, bitcast=True))
    tl.store(found + lanes, device.code_of(x, None, ELEMENT, HARDWARE))
    if ELEMENT.form.has_stochastic:
        tl.store(found + BLOCK + lanes, device.code_of(x, bits, ELEMENT, HARDWARE))


@triton.jit
def block_noise_probe(noise, seed, first_group, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    bits = device.noise_of_block(seed, first_group, lanes)
    tl.store(noise + lanes, bits.to(tl.int32, bitcast=True))


@triton.jit
def decode_probe(codes, found, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """The values of the 256 codes."""
    lanes = tl.arange(0, 256)
    tl.store(found + lanes, device.value_of(tl.load(codes + lanes), ELEMENT, HARDWARE))


@triton.jit
def word_probe(values, words, again, HARDWARE: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, 32] a program to nearest as words of eight codes of E2M1, and what they decode to."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    made = packed_e2m1(tl.load(values + rows * 32 + tl.arange(0, 32)[None, :]), None, HARDWARE)
    tl.store(words + rows * 4 + tl.arange(0, 4)[None, :], made.to(tl.int32, bitcast=True))
    decoded = unpacked_e2m1(made, HARDWARE)
    tl.store(again + rows * 32 + tl.arange(0, 32)[None, :], decoded)


@triton.jit
def reciprocal_probe(codes, found):
    lanes = tl.arange(0, 256)
    tl.store(found + lanes, device.reciprocal_e8m0(tl.load(codes + lanes)))


@triton.jit
def nibble_probe(codes, packed, unpacked, ROWS: tl.constexpr, NUMEL: tl.constexpr):
    """[ROWS, NUMEL] codes, packed and unpacked again."""
    rows = tl.arange(0, ROWS)[:, None]
    made = device.pack_nibbles(tl.load(codes + rows * NUMEL + tl.arange(0, NUMEL)[None, :]))
    tl.store(packed + rows * (NUMEL // 2) + tl.arange(0, NUMEL // 2)[None, :], made)
    again = device.unpack_nibbles(made)
    tl.store(unpacked + rows * NUMEL + tl.arange(0, NUMEL)[None, :], again)


@triton.jit
def scale_probe(amaxes, found, CODEC: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(found + lanes, CODEC.rule(tl.load(amaxes + lanes), CODEC.element))


@triton.jit
def amax_probe(values, found, ROWS: tl.constexpr, NUMEL: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(values + rows[:, None] * NUMEL + tl.arange(0, NUMEL)[None, :])
    tl.store(found + rows, device.amax(x, 1))
