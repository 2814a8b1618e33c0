"""How ops are named on the command line."""

import pytest

from sidestream.bench.op_names import ops_named
from sidestream.kernels.cases import rows
from sidestream.training.errors import UsageError

OPS = [row.op for row in rows()]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.op)
def test_every_op_goes_by_its_name_its_function_and_without_the_underscore(row):
    names = {row.op, row.function, row.op.removesuffix("_")}
    assert [ops_named([name], OPS) for name in names] == [{row.op}] * len(names)


def test_several_are_named_at_once():
    assert ops_named(["cast", "pack_", "cast_"], OPS) == {"cast_", "pack_"}


@pytest.mark.parametrize("name", ["fly", "", "unpack"])
def test_what_is_none_of_them_is_told_with_what_is(name):
    with pytest.raises(UsageError) as refused:
        ops_named(["pack", name], ["pack_", "cast_"])
    assert str(refused.value) == (
        f"--op: expected some of pack_, cast, got {name!r}; choose of these"
    )
