"""Small kernels around the functions of `device_codes`, to interpret and to compile."""

import triton
import triton.language as tl

from sidestream.kernels.formats import device_codes as device


@triton.jit
def encode_probe(
    values, found, rounded, noise, seed, first, HARDWARE: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of `found`: e4m3, e5m2, e2m1 to nearest, then stochastically; noise of `first` on."""
    lanes = tl.arange(0, BLOCK)
    x = tl.load(values + lanes)
    bits = device.noise_of(seed, first + lanes)
    tl.store(noise + lanes, bits.to(tl.int32, bitcast=True))
    tl.store(found + lanes, device.encode_e4m3(x, HARDWARE))
    tl.store(found + BLOCK + lanes, device.encode_e5m2(x, HARDWARE))
    tl.store(found + 2 * BLOCK + lanes, device.encode_e2m1(x))
    tl.store(found + 3 * BLOCK + lanes, device.encode_e4m3_stochastic(x, bits))
    tl.store(found + 4 * BLOCK + lanes, device.encode_e5m2_stochastic(x, bits))
    tl.store(found + 5 * BLOCK + lanes, device.encode_e2m1_stochastic(x, bits))
    brain = device.round_bf16_stochastic(x, bits)
    tl.store(rounded + lanes, brain.to(tl.int16, bitcast=True))


@triton.jit
def block_noise_probe(noise, seed, first_group, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    bits = device.noise_of_block(seed, first_group, lanes)
    tl.store(noise + lanes, bits.to(tl.int32, bitcast=True))


@triton.jit
def decode_probe(codes, found, HARDWARE: tl.constexpr):
    """Rows of `found`: the 256 codes as e4m3, e5m2, e2m1, e8m0, and e8m0's reciprocals."""
    lanes = tl.arange(0, 256)
    code = tl.load(codes + lanes)
    tl.store(found + lanes, device.decode_e4m3(code, HARDWARE))
    tl.store(found + 256 + lanes, device.decode_e5m2(code))
    tl.store(found + 512 + lanes, device.decode_e2m1(code))
    tl.store(found + 768 + lanes, device.decode_e8m0(code))
    tl.store(found + 1024 + lanes, device.reciprocal_e8m0(code))


@triton.jit
def nibble_probe(codes, packed, unpacked, ROWS: tl.constexpr, NUMEL: tl.constexpr):
    """[ROWS, NUMEL] codes, packed and unpacked again."""
    rows = tl.arange(0, ROWS)[:, None]
    made = device.pack_nibbles(tl.load(codes + rows * NUMEL + tl.arange(0, NUMEL)[None, :]))
    tl.store(packed + rows * (NUMEL // 2) + tl.arange(0, NUMEL // 2)[None, :], made)
    again = device.unpack_nibbles(made)
    tl.store(unpacked + rows * NUMEL + tl.arange(0, NUMEL)[None, :], again)


@triton.jit
def scale_probe(amaxes, found, ELEMENT: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(found + lanes, device.scale_byte(tl.load(amaxes + lanes), ELEMENT, RULE))


@triton.jit
def amax_probe(values, found, ROWS: tl.constexpr, NUMEL: tl.constexpr):
    rows = tl.arange(0, ROWS)
    x = tl.load(values + rows[:, None] * NUMEL + tl.arange(0, NUMEL)[None, :])
    tl.store(found + rows, device.amax(x, 1))
