"""SIGTERM ends a run after a step and its checkpoint, the same step on all ranks.

    SIGTERM reaches a rank      at any time: it is noted
    the rank's next loss        the note travels in the collective of its mean
    CPU: after that step        every rank reads the same number, saves the step and ends
    GPU: a step later           the host need not wait for the step that it has enqueued last
    after each save             the ranks ask one another at once: it may have taken long

What a second SIGTERM does is said at `launch.interruption.noting_stop`.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .launch.interruption import StopRequest, noting_stop
from .launch.ranks import Place, max_over_ranks, mean_over_ranks
from .measures import clock_of


class Stopping:
    """The request that a run stops, of one rank, and whether the ranks agree that it was made.

    can_save: without checkpoints that outlive the run nothing is noted, and SIGTERM does what it
    did before.
    """

    def __init__(self, place: Place, device: torch.device, *, can_save: bool) -> None:
        self._request = StopRequest()
        self._is_among_others = place.init_method is not None
        self._device = device
        self._can_save = can_save
        self._clock = clock_of(device)
        self._steps_late = 1 if device.type == "cuda" else 0
        self._asked: deque[tuple[Tensor, Any]] = deque()
        self._is_agreed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM inside the block, if the run can save what it has done."""
        if not self._can_save:
            yield
            return
        with noting_stop(among_others=self._is_among_others) as self._request:
            yield

    def mean_over_ranks(self, loss: Tensor, what: str) -> Tensor:
        """Return the mean over the ranks of the scalar `loss`, FP32, the same bits on each of them,
        as `launch.ranks.mean_over_ranks` does; each rank calls this once a step.

        Raises:
            CommunicationError: another rank is gone.
        """
        both = torch.stack((loss.float(), torch.full_like(loss, float(self._request.is_made))))
        mean, asked = mean_over_ranks(both, what).unbind()
        if self._can_save:
            self._asked.append((self._clock.on_host(asked), self._clock.mark()))
        return mean

    def is_agreed(self) -> bool:
        """Whether to stop after the step of the last mean: alike on all ranks."""
        while len(self._asked) > self._steps_late:
            asked, moment = self._asked.popleft()
            self._clock.wait(moment)
            self._is_agreed |= bool(asked > 0)
        return self._is_agreed

    def is_agreed_now(self) -> bool:
        """Whether to stop at once; every rank calls this, and it is a collective.

        Raises:
            CommunicationError: another rank is gone.
        """
        is_made = float(self._request.is_made)
        self._is_agreed |= max_over_ranks(is_made, "request to stop", self._device) > 0
        return self._is_agreed
