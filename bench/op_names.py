"""How ops are named on the command line: by op or by function, `cast_` or `cast`."""

from __future__ import annotations

from collections.abc import Iterable

from ..kernels.cases import rows
from ..training.errors import UsageError


def ops_named(names: Iterable[str], ops: Iterable[str]) -> frozenset[str]:
    """Those of `ops` that `--op` asks for by `names`.

    Raises:
        UsageError: a name of none of them.
    """
    wanted = set(ops)
    functions = {row.function: row.op for row in rows() if row.op in wanted}
    known = functions | {op: op for op in functions.values()}
    # "pack" for pack_, whose function has the underscore too.
    known |= {op.removesuffix("_"): op for op in functions.values()}
    found = set()
    for name in names:
        if name not in known:
            raise UsageError(
                f"--op: expected some of {', '.join(functions)}, got {name!r}; choose of these"
            )
        found.add(known[name])
    return frozenset(found)
