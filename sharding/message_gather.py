"""Parameters gathered as wire messages: encoded from the main ones, sent as bytes, decoded by all.

    main        a message for each slice of the flat buffer that this rank has: codes and scales
    at rest     the messages of what the rank keeps, where full parameters are freed: a gather
                begins with them, and encodes anew only after the main parameters have changed
    on the way  the messages of all slices, for as long as a gather takes
    gathered    what they say, in the compute dtype: the same bits on every rank, at every level

One message has one slice, as many elements as each rank's share of the buffer, whoever keeps it: so
what a message says does not depend on who keeps what.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import BufferPool, Hop, PlacedBuffer, cut
from ..kernels import pack_message_, unpack_message_
from .collectives import Collectives, Pending
from .lanes import Stage
from .message_wire import FORMATS, message_bytes
from .unit_spec import UnitSpec


class MessageGather:
    """The way from `main` to `gathered`, which is grown only when all messages are there."""

    main_casts: None = None
    """An optimizer cannot write messages."""
    moves = True

    def __init__(
        self,
        spec: UnitSpec,
        main: PlacedBuffer,
        gathered: PlacedBuffer,
        collectives: Collectives,
        pool: BufferPool,
    ) -> None:
        assert spec.param_wire is not None, "parameters travel as they are"
        self._format = FORMATS[spec.param_wire]
        self._main, self._gathered, self._pool = main, gathered, pool
        self._frees = spec.placements.frees_params
        self._slice_numel = spec.layout.shard_numel
        self._channels = collectives.channels
        self._what = f"gather of unit '{spec.name}'"
        self._slot_bytes = message_bytes(spec.param_wire, self._slice_numel)
        self.numel = self._slot_bytes * spec.layout.world_size
        """Bytes that all ranks send of a unit, together."""
        held, whole = spec.placements, spec.placements.whole
        self._main_span = collectives.grid.span(self.numel, held.main)
        self._rest: Tensor | None = None
        self._rest_start = 0
        self._rest_hops: Sequence[Hop] = ()
        source = held.main
        if self._frees:
            self._rest_start, stop = collectives.grid.span(self.numel, held.params)
            self._rest = pool.lease(stop - self._rest_start, torch.uint8)
            self._rest_hops = collectives.hops(self.numel, held.main, held.params)
            source = held.params
        self._hops = collectives.hops(self.numel, source, whole)
        self._messages: Tensor | None = None  # of a gather that is under way

    # ---- the gather

    def stages(self, *, kept_is_fresh: bool, main_is_cast: bool = False) -> list[Stage]:
        """See `UnitBuffers.stages`."""
        assert not main_is_cast, "an optimizer cannot write messages"
        stages: list[Stage] = []
        if self._rest is not None and not kept_is_fresh:
            stages.append(self._encode_rest)
            stages += [functools.partial(self._complete_rest, hop) for hop in self._rest_hops]
        stages.append(self._begin)
        stages += [functools.partial(self._hop, place) for place in range(1, len(self._hops))]
        return [*stages, self._decode]

    def lose(self) -> None:
        """A gather could not go on: nobody may get its memory next."""
        if self._messages is not None:
            self._pool.lose(self._messages)
            self._messages = None

    def _encode_rest(self) -> Sequence[Pending]:
        assert self._rest is not None
        start, stop = self._main_span
        self._encode(self._rest[start - self._rest_start : stop - self._rest_start])
        return ()

    def _complete_rest(self, hop: Hop) -> Sequence[Pending]:
        assert self._rest is not None
        return self._move(hop, self._rest, self._rest_start)

    def _begin(self) -> Sequence[Pending]:
        self._messages = self._pool.lease(self.numel, torch.uint8)
        if self._rest is None:
            start, stop = self._main_span
            self._encode(self._messages[start:stop])
        elif not self._hops:
            self._messages.copy_(self._rest)
        return self._hop(0) if self._hops else ()

    def _hop(self, place: int) -> Sequence[Pending]:
        assert self._messages is not None
        return self._move(self._hops[place], self._messages, 0, None if place else self._rest)

    def _move(
        self, hop: Hop, messages: Tensor, start: int, own: Tensor | None = None
    ) -> Sequence[Pending]:
        """Start `hop` inside `messages`, which lie from byte `start` on; `own`: what this rank
        sends, None: what lies in its place.
        """
        flat = messages[hop.start - start : hop.stop - start]
        slices = cut(flat, hop.parts)
        own = slices[hop.own] if own is None else own
        return self._channels[hop.axis].gather(flat, slices, own, self._what)

    def _decode(self) -> Sequence[Pending]:
        assert self._messages is not None
        if self._frees:
            self._gathered.grow()
        # Past the version counter, as collectives write.
        self._fill(self._gathered.memory, self._messages)
        self._pool.release(self._messages)
        self._messages = None
        return ()

    # ---- messages

    def _encode(self, messages: Tensor) -> None:
        """Write the messages of what this rank has of the main parameters, uint8 [their bytes]."""
        main = self._main.memory.detach()
        slots = messages.view(-1, self._slot_bytes)
        if len(slots):
            pack_message_(slots, [main], self._format, offsets=[0])

    def _fill(self, flat: Tensor, messages: Tensor) -> None:
        """Fill `flat`, of the compute dtype, with what messages of its slices say."""
        if flat.numel():
            slots = messages.view(-1, self._slot_bytes)
            unpack_message_([flat], slots, self._format, offsets=[0])

    def sent_of_main(self) -> Tensor:
        """What is sent of the main parameters of this rank, in memory of its own."""
        start, stop = self._main_span
        messages = torch.empty(stop - start, dtype=torch.uint8, device=self._main.memory.device)
        self._encode(messages)
        return messages

    def main_as_gathered(self) -> Tensor:
        """What a gather makes of the main parameters of this rank [main's numel, compute dtype]."""
        messages = self.sent_of_main()
        flat = torch.empty(self._main.numel, dtype=self._gathered.dtype, device=messages.device)
        self._fill(flat, messages)
        return flat

    # ---- what it costs

    @property
    def rest_bytes(self) -> int:
        """What parameters take between two uses, beside `main`."""
        return self._gathered.nbytes if self._rest is None else self._rest.numel()

    @property
    def gathering_bytes(self) -> int:
        """What a gather takes beside `gathered`."""
        return self.numel

    def sent_bytes(self, gathers: int) -> Counter[str]:
        """What this rank sends to others along each axis in a step with so many gathers."""
        sent: Counter[str] = Counter()
        for hops, times in ((self._rest_hops, 1), (self._hops, gathers)):
            for hop in hops:
                name = self._channels[hop.axis].axis.name
                sent[name] += times * (hop.parts - 1) * hop.part_numel
        return sent

    def keep_gathered(self) -> bool:
        """What was written to the gathered parameters is rounded again by the next gather."""
        return False
