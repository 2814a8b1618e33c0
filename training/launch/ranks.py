"""Where this process stands among the ranks, which device it computes on, and the process group it
joins.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ...sharding import shorten_flight_record
from ...sharding.errors import communicating
from ..errors import OptionsError

INIT_METHOD_VARIABLE = "SIDESTREAM_INIT_METHOD"
# In the environment of what torchrun's agent starts.
AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
AGENT_POLL_S = 0.5
SHARD_DIM, OUTER_DIM = "dp_shard", "dp_outer"
GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Place:
    """Rank and world size, on this machine and in all; `init_method` is None when there is nobody
    else to meet.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What the ranks compute and communicate on, and why."""

    kind: str
    backend: str
    reason: str


def place_from(environ: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher (ours or torchrun) gave this process, None where there was
    no launcher.

    Raises:
        OptionsError: RANK is set but its companions are not, or are no numbers that go together.
    """
    if "RANK" not in environ:
        return None
    try:
        world_size = int(environ["WORLD_SIZE"])
        place = Place(
            rank=int(environ["RANK"]),
            world_size=world_size,
            local_rank=int(environ["LOCAL_RANK"]),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world_size)),
            init_method=environ.get(INIT_METHOD_VARIABLE, "env://"),
        )
        if not 0 <= place.local_rank < place.local_world_size <= world_size > place.rank >= 0:
            raise ValueError(f"ranks that are not below their world sizes: {place}")
        return place
    except (KeyError, ValueError) as error:
        raise OptionsError(
            f"expected RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them, got {error!r}; unset "
            "RANK to let --nproc start the ranks, or start them with torchrun"
        ) from error


def choose_device(requested: str, local_world_size: int) -> DeviceChoice:
    """Decide between CUDA and the CPU for `local_world_size` ranks on this machine.

    Raises:
        OptionsError: CUDA was asked for and there is none, or there are more ranks than GPUs.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu":
        return DeviceChoice("cpu", "gloo", "asked for with --device cpu")
    if not num_gpus:
        if requested == "cuda":
            raise OptionsError(
                "expected a GPU for --device cuda, got none that torch sees; pass --device cpu"
            )
        return DeviceChoice("cpu", "gloo", "torch sees no GPU")
    if local_world_size > num_gpus:
        raise OptionsError(
            f"expected at most one rank a GPU, got {local_world_size} ranks for {num_gpus} GPUs; "
            f"pass --nproc {num_gpus} or --device cpu"
        )
    return DeviceChoice("cuda", "nccl", f"torch sees {num_gpus} GPUs")


def default_num_ranks(requested_device: str) -> int:
    """Return how many ranks to start when nobody says: one a GPU, one on a CPU."""
    if requested_device == "cpu" or not torch.cuda.is_available():
        return 1
    return max(1, torch.cuda.device_count())


@contextmanager
def joined_group(
    place: Place, choice: DeviceChoice, *, alone_too: bool = False
) -> Iterator[torch.device]:
    """Join the process group and give this rank's device. In a world of one without a launcher
    there is a group only if it is wanted `alone_too`.
    """
    device = (
        torch.device(choice.kind, place.local_rank)
        if choice.kind == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.init_method is None and not alone_too:
        yield device
        return
    if choice.backend == "gloo":
        shorten_flight_record()
    dist.init_process_group(
        choice.backend,
        init_method=place.init_method,
        store=None if place.init_method is not None else dist.HashStore(),
        rank=place.rank,
        world_size=place.world_size,
        timeout=GROUP_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    # Not in a `finally`: after an error the peers may be gone, and leaving the group would wait
    # for them.
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Replicas:
    """How ranks share a model: `count` groups of consecutive ranks, each of which shards it;
    `strategy` says what the groups shard between them.

    `ranks_per_node`: gradients are summed inside so many ranks first; None: as the machines are.
    """

    count: int = 1
    strategy: str = "no_shard"
    ranks_per_node: int | None = None

    def check(self, world_size: int) -> None:
        """Refuse what `world_size` ranks cannot be.

        Raises:
            OptionsError: they cannot be cut into such groups, or these into such nodes.
        """
        if world_size % self.count:
            raise OptionsError(
                f"expected a --dp-outer that divides {world_size} ranks, got {self.count}; pass "
                f"another one, or start {-world_size % self.count} ranks more"
            )
        sharding = world_size // self.count
        if self.ranks_per_node is not None and sharding % self.ranks_per_node:
            raise OptionsError(
                f"expected --ranks-per-node to divide the {sharding} ranks that share a model, got "
                f"{self.ranks_per_node}; pass the number of ranks of a machine"
            )

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """The arguments of `fully_shard`; every rank of the process group, if there is one, calls
        this.
        """
        options = {} if self.ranks_per_node is None else {"ranks_per_node": self.ranks_per_node}
        if self.count == 1:
            return options
        names = (OUTER_DIM, SHARD_DIM)
        shape = (self.count, dist.get_world_size() // self.count)
        return {
            "device_mesh": init_device_mesh(device.type, shape, mesh_dim_names=names),
            "dp_shard_dim": SHARD_DIM,
            "dp_outer_dim": OUTER_DIM,
            "outer_dp_sharding_strategy": self.strategy,
            **options,
        }


def mean_over_ranks(value: Tensor, what: str) -> Tensor:
    """Return the mean of a tensor over the ranks, the same bits on each of them; `what` names it
    in errors.

    Raises:
        CommunicationError: another rank is gone.
    """
    total = value.detach().float().clone()
    if not dist.is_initialized():
        return total
    with communicating(f"the mean of the {what} over the ranks"):
        dist.all_reduce(total)
    return total / dist.get_world_size()


def max_over_ranks(value: float, what: str, device: torch.device) -> float:
    """Return the largest of the ranks' values; `what` names it in errors.

    Raises:
        CommunicationError: another rank is gone.
    """
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    with communicating(f"the largest {what} of the ranks"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest.item())


def wait_for_all(what: str) -> None:
    """Return once every rank is here; `what` names the place in errors.

    Raises:
        CommunicationError: another rank is gone.
    """
    if dist.is_initialized():
        with communicating(f"the wait for all ranks {what}"):
            dist.barrier()


def follow_launcher() -> None:
    """End this rank when the launcher at the other end of its standard input is gone."""

    def wait_for_end() -> None:
        # Not sys.stdin: a daemon thread that holds its lock would stop the interpreter from
        # shutting down.
        while os.read(0, 1):
            pass
        os._exit(1)

    if not sys.stdin.closed:
        threading.Thread(target=wait_for_end, name="follow-launcher", daemon=True).start()


def follow_agent(on_end: Callable[[], None]) -> None:
    """Call `on_end`, in a thread, when torchrun's agent, which started this process, is gone.

    A killed agent leaves its ranks running: nobody would end them when others fail, and those that
    a new agent starts in their place would share their devices with them.
    """
    agent = os.getppid()

    def wait_for_end() -> None:
        while os.getppid() == agent:
            time.sleep(AGENT_POLL_S)
        on_end()

    threading.Thread(target=wait_for_end, name="follow-agent", daemon=True).start()
