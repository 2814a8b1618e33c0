"""Which cases are chosen: nothing asked, each option, all together, and what is not there."""

import pytest

from sidestream.bench.kernel_cases.selection import Selection, select
from sidestream.kernels.cases import cases, rows
from sidestream.training.errors import UsageError


def test_nothing_asked_is_the_standard_cases_some_of_every_op():
    chosen = select(Selection())
    assert [case.full_name for case in chosen] == [
        case.full_name for case in cases() if case.standard
    ]
    assert {case.op for case in chosen} == {row.op for row in rows()}


def test_formats_and_dtypes_bring_what_is_not_standard():
    found = select(Selection(ops=("quantize_mx",), formats=("mxfp4",), dtypes=("fp32", "fp16")))
    assert {(case.format, case.dtype) for case in found} == {("mxfp4", "fp32"), ("mxfp4", "fp16")}
    assert not any(case.standard for case in found)


def test_worlds_are_those_asked_for_and_leave_out_what_has_none():
    found = select(Selection(worlds=(3, 5)))
    assert {case.world for case in found} == {3, 5}
    assert {case.op for case in found} == {"reduce_", "reduce_messages_", "reduce_peer_messages_"}


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Selection(ops=("pack", "fly")), ("--op", "'fly'", "quantize_mx, ")),
        (Selection(formats=("mxfp9",)), ("--format", "'mxfp9'", "mxfp8, ")),
        (Selection(dtypes=("fp64",)), ("--dtype", "'fp64'", "bf16, fp16, fp32")),
        (Selection(worlds=(0,)), ("--world", "1 to 1024", "got 0")),
        (
            Selection(ops=("quantize_mx",), formats=("nvfp4",)),
            ("op quantize_mx and format nvfp4", "mxfp8", "mxfp4", "bf16"),
        ),
        (Selection(ops=("cast",), worlds=(2,)), ("op cast and world 2", "none of them sum")),
    ],
    ids=["op", "format", "dtype", "world", "nothing has both", "no sums"],
)
def test_what_is_not_there_is_told_with_what_is(selection, words):
    with pytest.raises(UsageError) as refused:
        select(selection)
    assert all(word in str(refused.value) for word in words), str(refused.value)
