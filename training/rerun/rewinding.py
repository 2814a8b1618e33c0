"""All that a step is run again from: random numbers, data, the model's state and the user's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...sharding import KeptStep, keep_step
from .data_iterator import RerunDataIterator
from .random_states import RandomStates


@dataclass(frozen=True, slots=True)
class UserState:
    """What only the user knows of: `save()` returns it, `restore(state)` brings it back."""

    save: Callable[[], Any] = lambda: None
    restore: Callable[[Any], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class StepBegin:
    """The moment before a step."""

    random_states: RandomStates
    iterators: Sequence[RerunDataIterator]
    modules: Sequence[KeptStep]
    user: UserState
    user_state: Any

    @classmethod
    def now(
        cls, modules: Sequence[nn.Module], iterators: Sequence[RerunDataIterator], user: UserState
    ) -> "StepBegin":
        """Keep all; `iterators` have advanced to the step.

        Raises:
            RuntimeError: gradients of a sharded module wait for their exchange.
        """
        kept = [keep_step(module) for module in modules]
        state = user.save()
        random_states = RandomStates.now()  # last: who saves may draw
        return cls(random_states, iterators, kept, user, state)

    def rewind(self) -> None:
        """Be there again.

        Raises:
            RuntimeError: a microbatch was changed in place.
        """
        for iterator in self.iterators:
            iterator.rewind()
        for module in self.modules:
            module.restore()
        self.user.restore(self.user_state)
        self.random_states.restore()
