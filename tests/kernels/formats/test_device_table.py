"""What kernels are compiled for: caches tell two constants apart by all that compiled code has."""

import copy
import dataclasses

import pytest
import triton
import triton.language as tl
from triton.compiler import ASTSource

from sidestream.kernels.formats.device_table import codec_of, element_constant, element_of
from sidestream.kernels.formats.table import E2M1, E4M3, MXFP8, SCALE_RULES, rule_of


@triton.jit
def one_factor(scales, row_scales, CODEC: tl.constexpr, HARDWARE: tl.constexpr):
    return scales + 1.0


@triton.jit
def other_factor(scales, row_scales, CODEC: tl.constexpr, HARDWARE: tl.constexpr):
    return scales + 2.0


@triton.jit
def kernel(out, CODEC: tl.constexpr):
    lanes = tl.arange(0, 16)
    tl.store(out + lanes, CODEC.factors(lanes.to(tl.float32), None, CODEC, False))


CODEC = codec_of(MXFP8, SCALE_RULES["rceil"])
E3M2 = dataclasses.replace(E4M3, name="e3m2", exponent_bits=3, mantissa_bits=2)
# Two of each that differ in one thing: a JIT function, a rule, a number, an element's number.
PAIRS = {
    "function": [
        dataclasses.replace(CODEC, factors=function) for function in (one_factor, other_factor)
    ],
    "rule": [codec_of(MXFP8, SCALE_RULES[rule]) for rule in ("rceil", "even")],
    "number": [CODEC, dataclasses.replace(CODEC, block_numel=16)],
    "element": [CODEC, dataclasses.replace(CODEC, element=element_constant(E2M1))],
    "element's number": [
        dataclasses.replace(CODEC, element=element_constant(form))
        for form in (E3M2, dataclasses.replace(E3M2, max_code=0x7D))
    ],
}


@pytest.mark.parametrize("pair", PAIRS)
def test_caches_tell_them_apart(pair):
    one, other = PAIRS[pair]
    hashes = {
        ASTSource(kernel, {"out": "*fp32"}, {"CODEC": codec}).hash() for codec in (one, other)
    }
    assert len(hashes) == 2
    assert repr(one) != repr(other), "by their text the cache at run time knows them"


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_ones_share(pair):
    """Objects made twice, of the same row, as two processes do."""
    for codec in PAIRS[pair]:
        again = dataclasses.replace(codec)
        assert again.cache_key == codec.cache_key
        assert repr(again) == repr(codec)


def test_a_row_has_one_object():
    """Which is cheap to hash, and is itself where Triton copies globals."""
    assert codec_of(MXFP8, SCALE_RULES["rceil"]) is CODEC
    assert codec_of(MXFP8, rule_of(MXFP8, "rceil", False)) is CODEC
    assert copy.deepcopy(CODEC) is CODEC
    assert element_of(MXFP8.element) is CODEC.element.value
    assert element_of(E4M3).dtype is tl.float8e4nv


def test_only_the_true_rows_are_converted_by_hardware():
    """Whatever dtype another one bears."""
    for row in (E3M2, dataclasses.replace(E4M3, bias=8), dataclasses.replace(E4M3, max_code=0x7D)):
        assert row.dtype is E4M3.dtype
        assert element_of(row).dtype is None
