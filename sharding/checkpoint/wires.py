"""What wires keep between steps, in checkpoints.

    wires.<rank>.<name>    what that rank's messages of a gradient have lost and still owe, where
                           errors are fed back: of the parameter's shape, whatever the sharding
    wires.backwards.<i>    how many backwards have exchanged gradients, which noise counts with, of
                           the i-th sharded model in the module

With as many ranks as saved it, each gets its own back. With others, what the gradients are still
owed stays the same: a reduced gradient is s * (sum over the ranks of what their messages say), so
the debt is s * (sum of e). For means, s = 1 / ranks: each of the new ones gets (sum of e) / old
ranks, and V of them at 1 / V owe what W did at 1 / W. With a factor that does not go by the ranks
each gets (sum of e) / V. The sum is taken in FP32, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..fully_shard import runtimes
from ..messages import listed
from ..modules.uncompiled import plain_name, without_compile
from ..runtime import Runtime
from ..untrusted import shown
from .ranks import Ranks
from .read import Contents
from .stored import BadCheckpoint, Key, Stored, counts

_PLACE, _NAME = 1, 2  # in the path of a key
_MAX_DIGITS = 10  # of a rank


@dataclass(frozen=True, slots=True)
class Owed:
    """What a wire owes the gradients of one parameter [its shape], FP32 or BF16, in place.
    `is_mean`: whether these are means over the ranks.
    """

    tensor: Tensor
    is_mean: bool


@dataclass(frozen=True, slots=True)
class Wires:
    """Those of the sharded models in a module. `owed`: by the names of parameters."""

    runtimes: tuple[Runtime, ...]
    owed: Mapping[str, Owed]

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """What this rank saves."""
        tensors = {name: owed.tensor for name, owed in self.owed.items()}
        state: dict[str, Any] = {str(ranks.place): tensors} if tensors else {}
        if ranks.leads and self.runtimes:
            state["backwards"] = [runtime.exchange_order.backwards for runtime in self.runtimes]
        return {"wires": state} if state else {}


def wires_of(module: nn.Module) -> Wires:
    """Those of all models in `module` that were passed to `fully_shard`; none of a part of one."""
    known = {id(root): runtime for root, runtime in runtimes()}
    found = [
        (f"{name}." if name else "", known[id(part)])
        for name, part in without_compile(module).named_modules()
        if id(part) in known
    ]
    owed = {name: one for prefix, runtime in found for name, one in _owed_in(prefix, runtime)}
    return Wires(tuple(runtime for _, runtime in found), owed)


def _owed_in(prefix: str, runtime: Runtime) -> Iterator[tuple[str, Owed]]:
    for unit in runtime.units:
        residual = unit.reduction.residual
        if residual is None:
            continue
        is_mean = unit.spec.scale == 1.0 / runtime.collectives.world_size
        for name, segment in zip(unit.spec.names, unit.spec.layout.segments, strict=True):
            tensor = residual[segment.start : segment.stop].view(segment.shape)
            yield plain_name(prefix + name), Owed(tensor, is_mean)


@dataclass(frozen=True, slots=True)
class _Source:
    """Keys of what is summed, and what the sum is divided by."""

    keys: tuple[Key, ...] = ()
    divisor: int = 1


@dataclass(frozen=True, slots=True)
class FittingWires:
    """What to read for `wires`, decided. `sources`: for each parameter to which something is owed.
    `number_keys`: of what noise counts with.
    """

    wires: Wires
    sources: Mapping[str, _Source]
    number_keys: tuple[Key, ...]
    left_alone: tuple[str, ...]

    def stand_ins(self) -> dict[Key, Tensor]:
        """A tensor of the shape of all that `fill` reads, by key."""
        return {
            key: self.wires.owed[name].tensor
            for name, source in self.sources.items()
            for key in source.keys
        }

    def backwards(self, values: dict[str, Any]) -> list[int]:
        """Take the numbers out of `values`, read from the checkpoint.

        Raises:
            BadCheckpoint: they are none.
        """
        found = values.pop("wires", {}).get("backwards", [])
        return list(counts(found))

    def fill(self, contents: Contents, backwards: list[int]) -> None:
        """Read what is owed, nothing where there is no source, and count from `backwards` on. A
        checkpoint without a number, which needs none, leaves the count as it is: it has only to
        differ from exchange to exchange.
        """
        for name, owed in self.wires.owed.items():
            source = self.sources.get(name, _Source())
            total = torch.zeros(owed.tensor.shape)
            part = torch.empty_like(total)
            for key in source.keys:
                contents.fill({key: part})
                total += part
            owed.tensor.copy_(total / source.divisor)
        for runtime, number in zip(self.wires.runtimes, backwards, strict=False):
            runtime.exchange_order.backwards = number


def match_wires(
    stored: Stored, wires: Wires, ranks: Ranks, *, strict: bool, resets: bool
) -> FittingWires:
    """Compare what `stored` has of wires with those of a module. `resets`: whether what is owed is
    forgotten instead.

    Raises:
        ValueError: feedback that only one side has, unless it `resets`; if not `strict`, that of
            the checkpoint alone is left alone. Other shapes.
        BadCheckpoint: some ranks' are missing.
    """
    saved = {} if resets else _saved(stored)
    missing = [] if resets else [name for name in wires.owed if name not in saved]
    # To a module that exchanges nothing it does not matter.
    unexpected = [name for name in saved if name not in wires.owed] if wires.runtimes else []
    lines = [
        f"shape of {shown(key)}: expected {tuple(owed.tensor.shape)}"
        for name, owed in wires.owed.items()
        for key in saved.get(name, ())
        if stored.shape_of(key) != owed.tensor.shape
    ]
    if missing:
        lines.append(
            f"error feedback: expected what is owed to {_listed(missing)}, got none; pass "
            "load_checkpoint(..., reset_error_feedback=True) to begin with nothing owed"
        )
    alone = f"error feedback that the model's wires do not have: {_listed(unexpected)}"
    if unexpected and strict:
        lines.append(
            f"{alone}; give the model its wires, MessageWire(..., error_feedback=...), or pass "
            "reset_error_feedback=True to forget what is owed"
        )
    if lines:
        raise ValueError(
            f"checkpoint {shown(stored.folder)} does not fit the wires of the model, and nothing "
            "was loaded:\n  " + "\n  ".join(lines)
        )
    return FittingWires(
        wires=wires,
        sources={
            name: _source(saved[name], ranks, is_mean=owed.is_mean)
            for name, owed in wires.owed.items()
            if name in saved
        },
        number_keys=tuple(stored.keys_under("wires", "backwards")) if wires.runtimes else (),
        left_alone=(alone,) if unexpected else (),
    )


def _source(keys: tuple[Key, ...], ranks: Ranks, *, is_mean: bool) -> _Source:
    """keys: of all ranks that saved."""
    world_size = len(ranks.numbers)
    if len(keys) == world_size:
        return _Source((keys[ranks.place],))
    return _Source(keys, len(keys) if is_mean else world_size)


def _saved(stored: Stored) -> dict[str, tuple[Key, ...]]:
    """The keys of what all ranks owed each parameter, in rank order."""
    found: dict[str, dict[int, Key]] = {}
    for key in stored.keys_under("wires"):
        path = [str(part) for part in stored.paths[key]]
        if len(path) > _NAME and path[_PLACE].isdecimal() and len(path[_PLACE]) < _MAX_DIGITS:
            found.setdefault(".".join(path[_NAME:]), {})[int(path[_PLACE])] = key
    world_size = 1 + max((place for places in found.values() for place in places), default=0)
    for name, places in found.items():
        if len(places) != world_size:
            raise BadCheckpoint(
                f"wires: expected what each of {world_size} ranks owed to {shown(name)}, got that "
                f"of {len(places)}"
            )
    return {name: tuple(key for _, key in sorted(places.items())) for name, places in found.items()}


def _listed(names: list[str]) -> str:
    return listed([shown(name) for name in names])
