"""Data that can be given once more: the microbatches of one step are kept."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


class RerunDataIterator:
    """Gives what `iterable` gives, and after `rewind()` the same since `advance()` again.

    Keeps the microbatches of one step, not copies: one that was changed in place is refused.
    `state_dict()` has those that will be given again; it goes with an `iterable` that stands behind
    them. Who makes the iterable anew from where the step began needs no state.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._source = iter(iterable)
        self._kept: list[tuple[Any, tuple[int, ...]]] = []
        self._place = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._place == len(self._kept):
            microbatch = next(self._source)
            self._kept.append((microbatch, _versions(microbatch)))
        microbatch, _ = self._kept[self._place]
        self._place += 1
        return microbatch

    def rewind(self) -> None:
        """Give what came since `advance()` once more.

        Raises:
            RuntimeError: a microbatch was changed in place since.
        """
        for number, (microbatch, versions) in enumerate(self._kept[: self._place]):
            if _versions(microbatch) != versions:
                raise RuntimeError(
                    f"RerunDataIterator: expected microbatches that stay as they came, got number "
                    f"{number} of this step changed in place, so the step cannot be run again; "
                    "change a clone of it"
                )
        self._place = 0

    def advance(self) -> None:
        """A step begins: forget what was given."""
        del self._kept[: self._place]
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        """What is kept and not given yet, as after `rewind()`."""
        return {"microbatches": tuple(microbatch for microbatch, _ in self._kept[self._place :])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give what was kept first.

        Raises:
            ValueError: it is no such state.
        """
        microbatches = state_dict.get("microbatches")
        if not isinstance(microbatches, tuple):
            raise ValueError(
                "RerunDataIterator: expected the result of state_dict(), with 'microbatches', got "
                f"keys {sorted(state_dict)}"
            )
        self._kept = [(microbatch, _versions(microbatch)) for microbatch in microbatches]
        self._place = 0


def iterators_in(data_iterator: Any, *, must_rewind: bool) -> tuple[RerunDataIterator, ...]:
    """Those of a step: `data_iterator`, one, a list of them, or None.

    Raises:
        TypeError: one that cannot be rewound, if it `must_rewind`.
    """
    every = data_iterator if isinstance(data_iterator, list | tuple) else [data_iterator]
    for one in every:
        if must_rewind and one is not None and not isinstance(one, RerunDataIterator):
            raise TypeError(
                "should_run_forward_backward: expected a RerunDataIterator, None, or a list of "
                f"them, got a {type(one).__name__}; wrap it: RerunDataIterator(iterable)"
            )
    return tuple(one for one in every if isinstance(one, RerunDataIterator))


def _versions(microbatch: Any) -> tuple[int, ...]:
    """How often the tensors in nested containers were changed in place."""
    if isinstance(microbatch, Tensor):
        return () if microbatch.is_inference() else (microbatch._version,)
    parts: Iterable[Any] = ()
    if isinstance(microbatch, Mapping):
        parts = microbatch.values()
    elif isinstance(microbatch, list | tuple):
        parts = microbatch
    return tuple(version for part in parts for version in _versions(part))
