"""Finds accesses to the same memory, one of them a write, that no wait between streams orders, and
memory that may be unmapped while it is used.

Memory follows the caching allocator's rules. What is freed goes to any later allocation on the
stream that allocated it, without a wait for the streams that used it: every reuse that the rule
allows is checked, whether or not this process reuses the memory. And with expandable segments what
is freed may be unmapped as soon as the stream that allocated it has passed: by then all that used
it must have ended.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from sidestream.bench.virtual_streams import Machine, Stream


@dataclass(frozen=True)
class Access:
    """What operator `name`, the `position`-th of `stream`, does to a range of bytes."""

    name: str
    writes: bool
    stream: Stream
    position: int
    first_byte: int
    end_byte: int

    def is_before(self, stream: Stream) -> bool:
        """Whether it has certainly ended before whatever `stream` is given next."""
        return self.position <= stream.clock.get(self.stream, 0)

    def conflicts(self, other: "Access") -> bool:
        overlap = self.first_byte < other.end_byte and other.first_byte < self.end_byte
        return overlap and (self.writes or other.writes)


# The last read and the last write of each stream: what comes after them comes after all others.
Last = dict[tuple[Stream, bool], Access]


@dataclass
class Memory:
    """What one storage holds at present. `earlier`: how the memory it may be made of was used."""

    storage: StorageWeakRef
    owner: Stream
    earlier: Last
    accesses: list[Access] = field(default_factory=list)


class Racing(Machine):
    """Runs everything at once; collects `hazards` and, with what used the memory, `early_frees`.

    `fills`: whether new memory is filled when it is allocated, as poison and torch's deterministic
    mode do.
    """

    def __init__(self, *, fills: bool = False) -> None:
        super().__init__()
        self._fills = fills
        self.hazards: list[str] = []
        self.early_frees: list[str] = []
        self._memories: dict[int, Memory] = {}
        self._freed: dict[Stream, Last] = {}

    def resize(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        if (memory := self._memories.pop(storage._cdata, None)) is not None:
            self._free(memory)
        if size:
            self._memory_of(storage)
        return (original if self._fills else inspect.unwrap(original))(storage, size)

    def _free(self, memory: Memory) -> None:
        owner = self.streams.index(memory.owner)
        self.early_frees += [
            f"memory of stream {owner} is freed before it knows of {self._use(access)}"
            for access in memory.accesses
            if not access.is_before(memory.owner)
        ]
        last = self._freed.setdefault(memory.owner, {})
        for access in (*memory.earlier.values(), *memory.accesses):
            key = access.stream, access.writes
            if key not in last or last[key].position < access.position:
                last[key] = access

    def _memory_of(self, storage: torch.UntypedStorage) -> Memory:
        memory = self._memories.get(storage._cdata)
        if memory is None:
            for key in [key for key, old in self._memories.items() if old.storage.expired()]:
                self._free(self._memories.pop(key))
            earlier = dict(self._freed.get(self.current, {}))
            memory = Memory(StorageWeakRef(storage), self.current, earlier)
            self._memories[storage._cdata] = memory
        return memory

    def launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        self.current.clock[self.current] += 1
        values = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
        for argument, value in zip(schema.arguments, values, strict=True):
            alias = argument.alias_info
            self._touch(value, schema.name, writes=alias is not None and alias.is_write)
        outputs = func(*args, **kwargs)
        if not schema.is_mutable:
            self._touch(outputs, schema.name, writes="empty" not in schema.name)
        return outputs

    def _touch(self, value: object, name: str, *, writes: bool) -> None:
        stream = self.current
        for tensor in tree_leaves(value):
            if not isinstance(tensor, Tensor) or not tensor.numel():
                continue
            memory = self._memory_of(tensor.untyped_storage())
            size, offset = tensor.element_size(), int(tensor.storage_offset())
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = offset + 1 + sum((int(extent) - 1) * int(step) for extent, step in steps)
            access = Access(name, writes, stream, stream.clock[stream], offset * size, end * size)
            self._report(access, memory.earlier.values(), "reuses memory of")
            conflicts = [old for old in memory.accesses if old.conflicts(access)]
            self._report(access, conflicts, "is not ordered after")
            memory.accesses.append(access)

    def _report(self, access: Access, olds: Iterable[Access], what: str) -> None:
        self.hazards += [
            f"{access.name} on stream {self._index(access)} {what} {self._use(old)}"
            for old in olds
            if not old.is_before(access.stream)
        ]

    def _use(self, access: Access) -> str:
        kind = "a write" if access.writes else "a read"
        return f"{kind} by {access.name} on stream {self._index(access)}"

    def _index(self, access: Access) -> int:
        return self.streams.index(access.stream)
