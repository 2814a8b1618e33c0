"""What every rank says of itself, gathered where a caller asks for it."""

from typing import TypeVar

import torch.distributed as dist

from ..sharding.communicators import gather_objects
from ..sharding.data_parallel_groups import device_of

T = TypeVar("T")


def gathered(value: T, group: dist.ProcessGroup | None, what: str) -> list[T]:
    """Every rank's picklable `value`, in the order of the ranks of `group` (None: of the job; this
    rank's alone where no process group was initialised). All of them must call this.

    Raises:
        CommunicationError: a rank is gone; `what` names the place.
    """
    if group is None and not dist.is_initialized():
        return [value]
    over = dist.group.WORLD if group is None else group
    assert over is not None, "a job that is initialised has a group"
    return gather_objects(value, over, device_of(over), what)
