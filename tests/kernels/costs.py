"""Owns what the gates on compiled kernels measure: widths of accesses, instructions an element."""

import re


def widths(compiled, *functions):
    """Bits of the loads and of the stores made from these functions' lines."""
    accesses = compiled.accesses_of(*functions)
    found = [{access.bits for access in accesses if access.is_load == load} for load in (1, 0)]
    assert all(found), "no load or no store: the gate sees nothing"
    return found


def path_cost(compiled, elements_per_thread):
    """SASS instructions an element, from the start to the end of the first path that is wide.

    Up to the unconditional EXIT that follows the first store of 16 bytes. What comes after it is
    another path, or a division's routine for subnormal operands.
    """
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", compiled.assembly)
    store = next(at for at, line in enumerate(lines) if "STG.E.128" in line)
    end = next(at for at in range(store, len(lines)) if lines[at].strip() == "EXIT")
    assert end > 50, "the count sees nothing"
    return (end + 1) / elements_per_thread
