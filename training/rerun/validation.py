"""The validations of one run of a step: what was validated, and whether it was accepted.

Flags stay where results are: nothing here waits for a device before `firsts` is read.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .evidence import Again, Rejection

Result = Tensor | float
NONE = 2**31
"""Instead of a validation's place, where there is none."""
_SHOWN_NUMEL = 4


def relative_difference(one: Result, other: Result) -> Tensor:
    """FP64 of no dimension: the largest 2 |a - b| / |a + b|, 0 where both are NaN or the same
    infinity, infinity where only one is; of results of any real dtype, shapes must agree.
    """
    first, second = torch.as_tensor(one), torch.as_tensor(other)
    if first.shape != second.shape:
        return torch.full((), math.inf, dtype=torch.float64, device=first.device)
    if not first.numel():
        return torch.zeros((), dtype=torch.float64, device=first.device)
    first, second = first.double(), second.to(first.device).double()
    is_same = (first == second) | (first.isnan() & second.isnan())
    differences = 2 * (first - second).abs() / (first + second).abs()
    # Of NaN and a number, of two infinities, of a and -a.
    differences = torch.where(differences.isnan(), math.inf, differences)
    return torch.where(is_same, 0.0, differences).max()


@dataclass(frozen=True, slots=True)
class Validation:
    """One call of `validate_result`. rejected: of no dimension, on any device."""

    result: Result
    rejected: Tensor | bool
    message: str
    comparison: Callable[[Any, Any], Any]
    tolerance: float
    fatal: bool
    shared: bool

    def rejection(self, call: int) -> Rejection:
        """This one's, the `call`-th; waits for the device."""
        return Rejection(call, self.message, shown(self.result), self.fatal, self.shared)

    def again(self, initial: Result) -> Again:
        """How this result compares with `initial`; waits for the device."""
        if isinstance(initial, Tensor) and isinstance(self.result, Tensor):
            initial = initial.to(self.result.device)  # it may come from a checkpoint
        difference = float(self.comparison(initial, self.result))
        return Again(difference <= self.tolerance, shown(self.result))


def shown(result: Result) -> str:
    """A result in a few characters; waits for the device."""
    if not isinstance(result, Tensor):
        return f"{result:.9g}"
    if result.numel() > _SHOWN_NUMEL:
        magnitudes = result.double().abs()
        is_finite = magnitudes.isfinite()
        largest = float(torch.where(is_finite, magnitudes, 0.0).max())
        num_other = int((~is_finite).sum())
        return f"{result.numel()} numbers, magnitudes up to {largest:.9g}, {num_other} not finite"
    numbers = ", ".join(f"{number:.9g}" for number in result.flatten().tolist())
    return numbers if not result.ndim else f"[{numbers}]"


class Validations:
    """All of one run."""

    def __init__(self) -> None:
        self.calls: list[Validation] = []

    @property
    def messages(self) -> tuple[str, ...]:
        """Of all, in order."""
        return tuple(call.message for call in self.calls)

    def firsts(self) -> Tensor:
        """int64 [2]: the places of the first that was rejected, and of the first fatal one, `NONE`
        where there is none. Where the flags are.
        """
        on_host, places, flags = [NONE, NONE], [], []
        for place, call in enumerate(self.calls):
            if isinstance(call.rejected, Tensor):
                flags.append(call.rejected)
                places.append((place, place if call.fatal else NONE))
            elif call.rejected:
                on_host[0] = min(on_host[0], place)
                on_host[1] = min(on_host[1], place if call.fatal else NONE)
        if not flags:
            return torch.tensor(on_host)
        device = flags[0].device
        rejected = torch.stack([flag.to(device) for flag in flags])
        table = torch.tensor([*places, on_host]).to(device, non_blocking=True)
        table[:-1].masked_fill_(~rejected[:, None], NONE)
        return table.amin(0)

    def rejections(self) -> tuple[Rejection | None, Rejection | None]:
        """The first that was rejected, and the first fatal one; waits for the device."""
        first, fatal = (
            None if place == NONE else self.calls[place].rejection(place)
            for place in self.firsts().tolist()
        )
        return first, fatal

    def again(self, rejection: Rejection, initial: Result) -> Again:
        """How the validation of `rejection` went in this run."""
        if rejection.call < len(self.calls):
            call = self.calls[rejection.call]
            if call.message == rejection.message:
                return call.again(initial)
        return Again(is_reproduced=False, shown="")

    def differences(self, first: Sequence[Validation]) -> Iterator[tuple[str, float]]:
        """By message, how far results are from those of the `first` run, where both made the same
        validation; waits for the device.
        """
        for one, other in zip(first, self.calls, strict=False):
            if one.message == other.message:
                yield other.message, float(other.comparison(one.result, other.result))


def kept(result: Any) -> Result:
    """A copy of `result` that nobody changes.

    Raises:
        TypeError: it is neither a number nor a tensor of real numbers.
    """
    if isinstance(result, Tensor) and not result.is_complex():
        return result.detach().clone()
    if isinstance(result, bool | int | float):
        return float(result)
    raise TypeError(
        "validate_result: expected a number or a tensor of real numbers, got a "
        f"{type(result).__name__}; pass what can be compared, such as a loss or a norm"
    )


def is_rejected(answer: Any) -> Tensor | bool:
    """What a rejection function answered, for any element."""
    return answer.detach().any() if isinstance(answer, Tensor) else bool(answer)
