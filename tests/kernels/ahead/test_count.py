"""Counting one path of machine code, on texts as the disassemblers of NVIDIA and AMD write them."""

import pytest

from sidestream.kernels.ahead.compile import Access, instructions_of
from sidestream.kernels.ahead.count import CountError, full_path, shortest_full_path

# Two paths: one by 16 bytes, on which a branch skips a call, and a masked loop.
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @P0 BRA `(.L_x_1) ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P1 BRA `(.L_x_0) ;
        /*0040*/                   MUFU.RCP R8, R8 ;
        /*0050*/                   CALL.REL.NOINC `($division) ;
.L_x_0:
        /*0060*/                   STG.E.128 desc[UR4][R6.64], R4 ;
        /*0070*/                   STG.E.U8 desc[UR4][R6.64+0x10], R4 ;
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/              @P2 LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*00a0*/              @P2 STG.E.U16 desc[UR4][R2.64], R4 ;
        /*00b0*/              @P3 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
.L_x_2:
        /*00d0*/                   BRA `(.L_x_2);
        /*00e0*/                   NOP;
"""
# No EXIT follows its wide store: the code ends above, where a branch goes back to.
SASS_BACKWARD = """
        /*0000*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   EXIT ;
.L_x_1:
        /*0020*/                   STG.E.128 desc[UR4][R6.64], R4 ;
        /*0030*/                   BRA `(.L_x_0) ;
"""
SASS_LOOP = """
.L_x_0:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @P0 BRA `(.L_x_0) ;
        /*0020*/                   STG.E.128 desc[UR4][R6.64], R4 ;
        /*0030*/                   EXIT ;
"""
# Of two dtypes, each by one wide load; and one by two that a mask guards.
SASS_DTYPES = """
        /*0000*/              @P0 BRA `(.L_x_0) ;
        /*0010*/                   LDG.E.ENL2.256 R4, desc[UR4][R2.64] ;
        /*0020*/                   EXIT ;
.L_x_0:
        /*0030*/              @P1 BRA `(.L_x_1) ;
        /*0040*/                   LDG.E.ENL2.256 R4, desc[UR4][R2.64] ;
        /*0050*/                   FMUL R4, R4, R4 ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/              @P2 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0080*/              @P2 LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0090*/                   FMUL R4, R4, R4 ;
        /*00a0*/                   FMUL R4, R4, R4 ;
        /*00b0*/                   EXIT ;
"""
AMD = """
\t.loc\t1 12 3
\ts_cbranch_execz .LBB0_2
; %bb.1:
\tglobal_load_dwordx4 v[0:3], v4, s[2:3]
\tbuffer_store_short_d16_hi v1, v5, s[8:11], 0 offen
\ts_branch .LBB0_3
.LBB0_2:
\tglobal_load_ubyte v0, v4, s[2:3]
.LBB0_3:
\ts_endpgm
"""


def test_the_wide_path_is_counted_with_the_longer_of_its_ways():
    path = full_path(instructions_of(SASS, "cuda"), 32)
    assert path.instructions == 9
    assert path.accesses == (Access(True, 128), Access(False, 128), Access(False, 8))


def test_waits_that_a_disassembler_tells_are_no_part_of_an_instruction():
    """As that of Triton 3.6 does for sm_120."""
    text = SASS.replace(" ;", "   &req={3,0} &wr=0x2   ?WAIT5_END_GROUP;")
    assert text != SASS
    assert instructions_of(text, "cuda") == instructions_of(SASS, "cuda")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(SASS_LOOP, "without loops"), (SASS_BACKWARD, "16 bytes, got none"), ("", "got none")],
    ids=["loop", "no exit after the store", "no code"],
)
def test_what_cannot_be_counted_is_told(text, expected):
    with pytest.raises(CountError, match=expected):
        full_path(instructions_of(text, "cuda"), 32)


def test_a_path_moves_no_more_than_the_thread_has():
    with pytest.raises(CountError, match="up to 1 accesses"):
        full_path(instructions_of(SASS, "cuda"), 31)


def test_accesses_without_a_mask_come_first_and_then_the_longer_or_the_shorter_path():
    code = instructions_of(SASS_DTYPES, "cuda")
    assert full_path(code, 32).instructions == 5
    assert shortest_full_path(code, 32).instructions == 3


def test_amd_s_assembly_is_read_as_well():
    path = full_path(instructions_of(AMD, "hip"), 32)
    assert path.instructions == 5
    assert path.accesses == (Access(True, 128), Access(False, 16))
