"""By what sums of gradients travel along each axis: messages, or what peers packed, read where it
lies. All ranks decide together when a model is sharded, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..buffers import BufferPool
from . import peer_memory
from .collectives import Collectives, Pending
from .data_parallel_groups import DataParallelGroups
from .lanes import Lane
from .sum_plan import plan_sums
from .symmetric import Slots, SymmetricChannel, leaves_moving
from .unit_spec import UnitSpec

T = TypeVar("T")
_SLOT_ALIGN_BYTES = 512
"""As an allocation of torch's: the kernels' widest accesses find every part aligned."""
_NOTHING = "no unit sends along it what others could read where it lies"


def find_obstacles(
    mode: str, groups: DataParallelGroups, reaches: Sequence[peer_memory.Reach]
) -> list[str]:
    """Why sums along each axis go by messages; empty for those that read peers' memory. `reaches`:
    of all ranks. Equal on all ranks: along an axis all lines of ranks can, or none does.

    Raises:
        ValueError: `mode` is "on" and gradients, which travel along the first axis that has
            communicators, cannot. Sums over an axis go on by messages where they have to.
    """
    found = [
        "one rank" if axis.reduce is None else _obstacle_along(place, groups, reaches)
        for place, axis in enumerate(groups.axes)
    ]
    place = _first_of(groups)
    if mode == "on" and place is not None and found[place]:
        raise ValueError(_refusal(groups.axes[place].name, found[place]))
    return found


def _first_of(groups: DataParallelGroups) -> int | None:
    """The axis along which gradients travel; None on one rank."""
    places = [place for place, axis in enumerate(groups.axes) if axis.reduce is not None]
    return places[0] if places else None


def _obstacle_along(
    axis: int, groups: DataParallelGroups, reaches: Sequence[peer_memory.Reach]
) -> str:
    lines: dict[tuple[int, ...], dict[int, peer_memory.Reach]] = {}
    for rank, place in enumerate(groups.coordinates):
        lines.setdefault(place[:axis] + place[axis + 1 :], {})[rank] = reaches[rank]
    return next(filter(None, map(peer_memory.obstacle, lines.values())), "")


def _refusal(axis: str, why: str) -> str:
    return (
        f"symmetric_memory: expected ranks along '{axis}' that read each other's memory, which "
        f"'on' asks for, but {why}; pass 'auto' or 'off' to exchange messages, or ranks_per_node "
        "where the axis spans machines"
    )


def open_channels(
    mode: str,
    specs: Sequence[UnitSpec],
    collectives: Collectives,
    pool: BufferPool,
    lane: Lane,
) -> None:
    """Have sums read peers' memory along the axes where `mode` asks for it and all ranks can (a
    collective, unless it is "off"). `specs`: the units that train. `lane`: of the exchanges.

    Raises:
        ValueError: as `find_obstacles`; or ranks do not get or map the memory.
    """
    if mode == "off":
        return
    if mode == "on":
        _require_wires(specs)
    groups = collectives.groups
    reaches = collectives.gather_objects(peer_memory.reach_of(groups.device))
    obstacles = find_obstacles(mode, groups, reaches)
    sizes = _message_bytes(specs, collectives, pool)
    for place, (axis, why) in enumerate(zip(groups.axes, obstacles, strict=True)):
        if not why:
            size = sizes[place]
            why = _open(place, size, collectives, pool, lane) if size else _NOTHING
            if why and why is not _NOTHING and mode == "on" and place == _first_of(groups):
                raise ValueError(_refusal(axis.name, why))
        collectives.detours[axis.name] = why


def _require_wires(specs: Sequence[UnitSpec]) -> None:
    for spec in specs:
        if not leaves_moving(spec.wires[0]):
            raise ValueError(
                "symmetric_memory: expected wires that leave moving to the ranks' memory, which "
                f"'on' asks for, got {spec.wires[0]!r} for unit '{spec.name}', which moves itself "
                "what it sends; pass 'auto' or 'off', or another wire"
            )


def _message_bytes(
    specs: Sequence[UnitSpec], collectives: Collectives, pool: BufferPool
) -> list[int]:
    """Of each axis: the largest message of all its parts, 0 if none can lie in a peer's memory."""
    largest = [0] * len(collectives.channels)
    for spec in specs:
        for one in plan_sums(spec, collectives, pool):
            if leaves_moving(one.wire):
                nbytes = one.hop.parts * one.message_bytes
                largest[one.hop.axis] = max(largest[one.hop.axis], nbytes)
    return largest


def _open(
    place: int, message_bytes: int, collectives: Collectives, pool: BufferPool, lane: Lane
) -> str:
    """Open the channel along one axis; why not, if a rank cannot, and then no rank does."""
    plain, device = collectives.channels[place], collectives.groups.device
    assert plain.axis.reduce is not None, "an axis without communicators has no exchanges"
    depth = lane.max_exchanges
    slot_bytes = -(-message_bytes // _SLOT_ALIGN_BYTES) * _SLOT_ALIGN_BYTES
    nbytes = 2 * depth * slot_bytes
    own, why = _attempt(lambda: peer_memory.allocate(nbytes, device), collectives)
    if own is None:
        return why
    group = plain.axis.reduce
    memory, why = _attempt(lambda: peer_memory.CudaMemory(own, group), collectives)
    if memory is None:
        return why
    slots = Slots(memory, plain.rank, slot_bytes=slot_bytes, depth=depth)
    # The memory may be what an earlier model gave back, of which a peer's stream still reads.
    for number in range(depth):
        Pending(memory.meet(number), f"first meeting along '{plain.axis.name}'", group).wait()
    channel = SymmetricChannel(plain.axis, device, collectives.traffic, collectives.uses, slots)
    collectives.sum_channels[place].insert(0, channel)
    pool.count_beside(nbytes)
    return ""


def _attempt(step: Callable[[], T], collectives: Collectives) -> tuple[T | None, str]:
    """What `step` gives, if it does so on all ranks; else None, and the first rank's error."""
    value, error = None, ""
    try:
        value = step()
    except RuntimeError as raised:
        error = str(raised).partition("\n")[0]
    for rank, told in enumerate(collectives.gather_objects(error)):
        if told:
            return None, f"rank {rank} got: {told}"
    return value, ""


def symmetric_bytes(collectives: Collectives) -> int:
    """What this rank holds for others to read."""
    return sum(one.slots.nbytes for one in _opened(collectives).values())


def routes(collectives: Collectives) -> dict[str, str]:
    """By axis what its sums go by, in words."""
    opened = _opened(collectives)
    found = {}
    for place, plain in enumerate(collectives.channels):
        name, why = plain.axis.name, collectives.detours.get(plain.axis.name)
        if place in opened:
            slots = opened[place].slots
            size = f"{slots.count} slots of {slots.slot_bytes / 2**20:,.2f} MiB"
            found[name] = f"{SymmetricChannel.route}, {size}"
        else:
            found[name] = plain.route + (f"; {why}" if why else "")
    return found


def _opened(collectives: Collectives) -> dict[int, SymmetricChannel]:
    return {
        place: channel
        for place, channels in enumerate(collectives.sum_channels)
        for channel in channels
        if isinstance(channel, SymmetricChannel)
    }
