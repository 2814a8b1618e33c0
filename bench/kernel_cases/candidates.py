"""Everyone who competes in a case, ours first."""

from __future__ import annotations

import torch

from ...kernels.case import Case
from .competitors import COMPILED, OURS, Bind, ours
from .packages import quiet
from .plain import plain_of
from .rivals import rivals_of

TORCH_COMPILE = "torch.compile"


def candidates_of(case: Case, *, compiled: bool) -> dict[str, Bind]:
    """Ours first, then the rivals; with `compiled` those as well that torch.compile makes."""
    found = {OURS: ours(case), **rivals_of(case)}
    if not compiled:
        return {name: bind for name, bind in found.items() if COMPILED not in name}
    # Compiled code is found again by the source it was made from, which cases share: after a few
    # sizes and dtypes of the same source torch would run it uncompiled.
    with quiet():
        torch.compiler.reset()
    plain = plain_of(case)
    if plain is not None:
        found[TORCH_COMPILE] = lambda operands: torch.compile(plain(operands), dynamic=False)
    return found
