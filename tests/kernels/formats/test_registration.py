"""Which rows from outside the tables take, and that those leave alone."""

from dataclasses import replace

import pytest
import torch

from sidestream.kernels.formats import registration
from sidestream.kernels.formats.registration import registered
from sidestream.kernels.formats.table import (
    BF16,
    CASTS,
    E4M3,
    E8M0,
    ELEMENTS,
    FP8_TENSOR,
    MESSAGES,
    MXFP8,
    NVFP4,
    SCALE_RULES,
    ElementFormat,
)
from sidestream.tests.kernels.wire.toy import E3M2, GENEROUS, TOY

E4M3_BUT_ONE = replace(E4M3, name="e4m3_but_one", max_code=0x7D)
TABLES = (ELEMENTS, CASTS, MESSAGES, SCALE_RULES)
REFUSED = {
    "block of 48": (replace(TOY, block_numel=48), "power of two up to 128, .* got 48; no block"),
    "block of 256": (replace(TOY, block_numel=256), "power of two up to 128, .* got 256"),
    "no codec": (replace(TOY, codec=None), "toy: expected a codec, got None; pass"),
    "other scale": (replace(TOY, scale_dtype=torch.float16), r"scale_dtype=.*e8m0.*float16"),
    "tensor's scale": (replace(TOY, tensor_scale=True), "tensor_scale=False, .* got True"),
    "row of E8M0": (replace(TOY, block_numel=None), "expected a block_numel, got None; only FP32"),
    "NVFP4 of 32": (replace(NVFP4, name="wide", block_numel=32), "block_numel=16, .* got 32"),
    "no mantissa": (
        ElementFormat("e3m0", 3, 0, 3, 0x7, None, torch.uint8), "exponent and mantissa, got",
    ),
    "message's name": (replace(TOY, name=MXFP8.name), "expected new names, got 'mxfp8' again"),
    "name of no message": (replace(TOY, name=FP8_TENSOR.name), "got 'fp8_tensor' again"),
    "element's name": (replace(E3M2, name=E8M0.name), "got 'e8m0' again"),
    "cast's name": (replace(E3M2, name=BF16.name), "got 'bf16' again"),
    "rule's name": (replace(GENEROUS, name="even"), "got 'even' again"),
    "2 bits": (
        ElementFormat("e1m0", 1, 0, 0, 0x1, None, torch.uint8), "of 3 to 8 bits, got 2; widen",
    ),
    "9 bits": (ElementFormat("e5m3", 5, 3, 15, 0xFF, None, torch.uint8), "3 to 8 bits, got 9"),
    "no sign": (replace(E8M0, name="ue8"), "ue8: expected a sign .* got has_sign=False"),
    "sign in the largest": (replace(E3M2, max_code=0x3F), "max_code from 1 to 31, got 63"),
    "two bytes": (replace(E3M2, dtype=torch.int16), r"dtype of one byte, got torch\.int16"),
    "block of 2 bits": (
        replace(TOY, element=ElementFormat("e1m0", 1, 0, 0, 0x1, None, torch.uint8)), "got 2;",
    ),
    "no row": (BF16, "expected ElementFormat, BlockFormat or ScaleRule, got WireFormat"),
}  # fmt: skip


def contents():
    return [list(table.items()) for table in TABLES]


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_code_is_refused_before_anything_is_added(name):
    before = contents()
    row, message = REFUSED[name]
    with pytest.raises(ValueError, match=message), registered(E4M3_BUT_ONE, row):
        pass
    assert contents() == before


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ValueError, match="got 'e3m2' again"), registered(E3M2, E3M2):
        pass


@pytest.mark.parametrize("block_numel", [2, 128], ids="{}".format)
def test_powers_of_two_are_taken(block_numel):
    form = replace(TOY, block_numel=block_numel)
    with registered(E3M2, form, GENEROUS):
        assert MESSAGES["toy"] is form
        assert list(MESSAGES)[-1] == "toy", "its place in headers"


def test_blocks_within_blocks_leave_what_was_there():
    before = contents()
    with registered(E3M2, TOY, GENEROUS):
        with registered(E4M3_BUT_ONE):
            assert set(CASTS) - dict(before[1]).keys() == {"e3m2", "e4m3_but_one"}
        assert ELEMENTS["e3m2"] is E3M2
        assert "e4m3_but_one" not in CASTS
    assert contents() == before


def test_other_names_are_there_while_a_block_ends(monkeypatch):
    """Another thread may look one up."""

    class Watched(dict):
        def __delitem__(self, name):
            super().__delitem__(name)
            assert "rceil" in self

        def clear(self):
            raise AssertionError("a table is empty")

    watched = Watched(SCALE_RULES)
    monkeypatch.setattr(registration, "SCALE_RULES", watched)
    with registered(GENEROUS):
        assert "generous" in watched
    assert list(watched) == list(SCALE_RULES)
