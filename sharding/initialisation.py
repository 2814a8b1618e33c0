"""Values for what is on the meta device: module by module, whole, and never the whole model.

While a stage of `modules/init_stages.py` runs, its modules hold plain tensors, filled with NaN, in
the place of their own; then these are handed out, and the modules show the meta device again.
Nothing else of the model may be written, and all must be: what is not raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..buffers.layout import round_up
from .collectives import Collectives
from .messages import listed
from .modules.init_stages import (
    OPTION,
    Initialiser,
    Slot,
    Slots,
    Stage,
    has_storage,
    plan_stages,
)
from .modules.partition import GroupPlan

_ALIGN_BYTES = 64  # as torch does


def plan_initialisation(
    module: nn.Module,
    plans: Sequence[GroupPlan],
    collectives: Collectives,
    initialiser: Initialiser,
) -> Initialisation | None:
    """What gives `module` values, None if nothing is asked for (a collective).

    Raises:
        ValueError: nothing would fill some tensor on the meta device; on all ranks.
    """
    if not initialiser:
        return None
    slots = Slots(module)
    missing = _find_missing(slots, collectives)
    units = [plan.module for plan in plans if not plan.is_root]
    stages = plan_stages(module, slots, missing, initialiser, units)
    device = collectives.groups.device
    return Initialisation(slots, missing, stages, device, is_applied=callable(initialiser))


def _find_missing(slots: Slots, collectives: Collectives) -> frozenset[str]:
    """What has no values on rank 0, from which all others get theirs (a collective)."""
    is_meta = {slot.name: slot.tensor.is_meta for slot in slots.first.values()}
    flags = torch.tensor([*is_meta.values()], dtype=torch.uint8, device=collectives.groups.device)
    collectives.broadcast(flags, "agreement on what has no values yet")
    return frozenset(name for name, missing in zip(is_meta, flags.tolist(), strict=True) if missing)


class Staging:
    """Memory on `device` that whole tensors take turns with.

    One piece: what is taken and freed tensor by tensor stays with malloc, up to twice as much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    @staticmethod
    def nbytes_for(tensors: Iterable[Tensor]) -> int:
        """How much `tensors` take at the same time."""
        return sum(round_up(tensor.nbytes, _ALIGN_BYTES) for tensor in tensors)

    def restart(self) -> None:
        """Take all memory back."""
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """A tensor of the shape, dtype and order of elements of `like`, with any contents."""
        form = torch.empty_like(like, device="meta")
        start, self._used = self._used, self._used + self.nbytes_for([like])
        flat = self._flat[start : start + form.nbytes].view(form.dtype)
        return flat.as_strided(form.shape, form.stride())


class _Guard(TorchDispatchMode):
    """Notes the memory that is written, by what identifies it, and refuses to write to `others`."""

    def __init__(self, others: Mapping[int, str]) -> None:
        super().__init__()
        self.others = others
        self.written: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # operators of higher order have none
        for position, argument in enumerate(schema.arguments if schema else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                for value in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(value, Tensor) and has_storage(value):
                        self._note(value.untyped_storage()._cdata)
        return func(*args, **kwargs)

    def _note(self, storage: int) -> None:
        if storage in self.others:
            raise RuntimeError(
                f"expected to write to the module at hand, got a write to '{self.others[storage]}' "
                "of another one, whose values are not here; set each module's tensors when its "
                "own turn comes"
            )
        self.written.add(storage)


class Initialisation:
    """Runs `stages` on `device`, and keeps what is not sharded of their results until `finish`."""

    def __init__(
        self,
        slots: Slots,
        missing: frozenset[str],
        stages: Sequence[Stage],
        device: torch.device,
        *,
        is_applied: bool,
    ) -> None:
        """`is_applied`: a tied parameter is one in all its modules, as in `module.apply`; else what
        its first module sets counts, as where constructors tie to a tensor that is there.
        """
        self._slots, self._missing, self._stages = slots, missing, stages
        self._device = device
        self._is_applied = is_applied
        self._guard = _Guard(slots.storages())
        self._ends: dict[int, int] = {}
        """In which stage a missing tensor is complete, by its id."""
        for number, stage in enumerate(stages):
            for slot in self._slots_of(stage):
                is_new = id(slot.tensor) not in self._ends
                if slot.name in missing and (is_new or is_applied):
                    self._ends[id(slot.tensor)] = number
        self._staging = Staging(
            max((Staging.nbytes_for(self._staged(stage)) for stage in stages), default=0), device
        )
        self._shown: dict[int, Tensor] = {}
        """What stands in the place of a tensor that is not complete, by the id of that."""
        self._whole: dict[int, Tensor] = {}
        """Values of what is not sharded, by the id of the old tensor."""
        self.failure: Exception | None = None

    def _slots_of(self, stage: Stage) -> Iterator[Slot]:
        for module in stage.modules:
            yield from self._slots.of[id(module)]

    def _staged(self, stage: Stage) -> Iterator[Tensor]:
        """What gets its memory from the staging of `stage` alone."""
        for slot in self._slots_of(stage):
            if slot.name in self._missing and _is_sharded(slot.tensor):
                yield slot.tensor

    def values(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter of the model, its value on the device) of every floating-point one that had
        none; the caller must not keep the value. After a `failure` they come without values: other
        ranks may have them, and take part in the same broadcasts.
        """
        for number, stage in enumerate(self._stages):
            self._staging.restart()
            if self.failure is None:
                try:
                    self._run(number, stage)
                except Exception as failure:  # noqa: BLE001 - raised when all ranks are through
                    self.failure = failure
            for old in {id(slot.tensor): slot.tensor for slot in self._slots_of(stage)}.values():
                if self._ends.get(id(old)) != number:
                    continue
                if _is_sharded(old):
                    yield old, self._take(old)
                else:
                    self._whole[id(old)] = self._take(old)

    def _take(self, old: Tensor) -> Tensor:
        """What stood in the place of `old`; anything of its shape after a failure."""
        shown = self._shown.pop(id(old), None)
        return torch.empty_like(old, device=self._device) if shown is None else shown.detach()

    def _run(self, number: int, stage: Stage) -> None:
        slots = [*self._slots_of(stage)]
        stand_ins = [self._stand_in(slot, number) for slot in slots]
        try:
            for slot, stand_in in zip(slots, stand_ins, strict=True):
                slot.tensors[slot.key] = stand_in
            for name, call in stage.calls:
                self._call(name, call)
            values = [slot.tensors.get(slot.key) for slot in slots]
        finally:
            for slot in slots:
                slot.tensors[slot.key] = slot.tensor
        problems = []
        for slot, stand_in, value in zip(slots, stand_ins, values, strict=True):
            if self._shown.get(id(slot.tensor)) is not stand_in:
                continue
            is_complete = self._ends[id(slot.tensor)] == number
            if problem := _problem(value, stand_in, self._guard.written if is_complete else None):
                problems.append(f"'{slot.name}' {problem}")
            else:
                assert value is not None
                self._shown[id(slot.tensor)] = value
        if problems:
            raise ValueError(
                f"{OPTION}: expected all parameters and buffers on the meta device to be set, got "
                f"{listed(problems, '; ')}; set them in reset_parameters, or pass a function that "
                "takes a module and sets what is its own"
            )

    def _call(self, name: str, call: Callable[[], object]) -> None:
        try:
            with self._guard:
                call()
        except Exception as error:
            error.add_note(f"while module '{name}' was initialised ({OPTION})")
            raise

    def _stand_in(self, slot: Slot, number: int) -> Tensor:
        """A plain tensor for `slot`. It is a copy that nobody looks at again where the tensor has
        values, gets them from rank 0, or is complete.
        """
        old, key = slot.tensor, id(slot.tensor)
        if slot.name not in self._missing:
            like = torch.zeros_like(old, device=self._device) if old.is_meta else old.clone()
            return _as(old, like.to(self._device))
        is_spare = self._ends[key] < number
        if key in self._shown and not is_spare:
            if self._is_applied or not isinstance(old, nn.Parameter):
                return self._shown[key]
            is_spare = True
        is_staged = _is_sharded(old) and (is_spare or self._ends[key] == number)
        new = self._staging.take(old) if is_staged else torch.empty_like(old, device=self._device)
        stand_in = _as(old, _unset(new))
        if not is_spare:
            self._shown[key] = stand_in
        return stand_in

    def finish(self, collectives: Collectives) -> None:
        """Put what is not sharded into the modules (a collective), or memory for rank 0's values.

        Raises:
            Exception: what failed on this rank; elsewhere RuntimeError with its text.
        """
        if self.failure is None and (names := self._meta_attributes()):
            self.failure = ValueError(
                f"{OPTION}: expected no tensors on the meta device but parameters and buffers, got "
                f"{listed(names)}; register them as buffers, or make them in forward"
            )
        texts = collectives.gather_objects(self.failure and f"{self.failure}")
        if self.failure is not None:
            raise self.failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"rank {rank}: {text}")
        for slot in self._slots:
            old = slot.tensor
            if not _is_sharded(old) and (old.is_meta or id(old) in self._whole):
                if id(old) not in self._whole:
                    self._whole[id(old)] = torch.empty_like(old, device=self._device)
                slot.tensors[slot.key] = _as(old, self._whole[id(old)])
        # From here on nobody else may keep what units take over, so that it goes one by one.
        self._slots.clear()
        self._staging = Staging(0, self._device)

    def _meta_attributes(self) -> list[str]:
        """Names of tensors that modules hold as plain attributes, which nobody would fill."""
        return [
            f"'{name}.{attribute}'" if name else f"'{attribute}'"
            for name, module in self._slots.modules
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_meta
        ]


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


def _as(old: Tensor, new: Tensor) -> Tensor:
    """`new` as a parameter with the marks of `old`, if that is one."""
    if not isinstance(old, nn.Parameter):
        return new
    param = nn.Parameter(new, requires_grad=old.requires_grad)
    vars(param).update(vars(old))
    return param


def _unset(tensor: Tensor) -> Tensor:
    """`tensor` filled with NaN, or with zeros where there is none."""
    return tensor.fill_(math.nan) if _has_nan(tensor) else tensor.zero_()


def _has_nan(tensor: Tensor) -> bool:
    is_wide = tensor.is_floating_point() and tensor.itemsize > 1
    return is_wide or tensor.is_complex()


def _problem(value: Tensor | None, stand_in: Tensor, written: set[int] | None) -> str:
    """Why `value`, found in the place of `stand_in`, cannot be taken; empty if it can.

    `written`: what was written, of a tensor that must be set by now.
    """
    if value is None or value.is_meta:
        return "not at all"
    if value.shape != stand_in.shape or value.dtype != stand_in.dtype:
        return (
            f"to {value.dtype} {tuple(value.shape)} instead of {stand_in.dtype} "
            f"{tuple(stand_in.shape)}"
        )
    if value is not stand_in or written is None or not value.numel():
        return ""
    if not _has_nan(value):
        return "" if value.untyped_storage()._cdata in written else "not at all"
    # The sum first: it takes no memory, and is no NaN where no element is.
    is_unset = bool(value.sum().isnan()) and bool(value.isnan().any())
    return "not everywhere, since it has NaN" if is_unset else ""
