"""How ranks come to know alike what each has found."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...sharding.errors import communicating
from ..across_ranks import gathered

T = TypeVar("T")


class Ranks:
    """Those of `group` (None: all of the job), or this one alone without a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._is_alone = group is None and not dist.is_initialized()
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        self.world_size = 1 if self._is_alone else dist.get_world_size(group)
        backends = "cpu" if self._is_alone else dist.get_backend_config(group)
        self._on_cpu = "cpu" in backends

    def smallest(self, numbers: Tensor) -> list[int]:
        """Of each of `numbers`, int64 [n] on any device, the smallest of all ranks: one collective,
        and the one time that the host waits for the device.

        Raises:
            CommunicationError: another rank is gone.
        """
        if self._is_alone:
            return numbers.tolist()
        device = "cpu" if self._on_cpu else torch.device("cuda", torch.cuda.current_device())
        shared = numbers.to(device)
        with communicating("the validations of a step"):
            dist.all_reduce(shared, dist.ReduceOp.MIN, self._group)
            return shared.tolist()

    def gather(self, value: T) -> list[T]:
        """What every rank passes, by rank.

        Raises:
            CommunicationError: another rank is gone.
        """
        if self._is_alone:
            return [value]
        return gathered(value, self._group, "what was found out about a step")
