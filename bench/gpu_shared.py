"""Trains with several ranks that share one device, over gloo, and compares with plain PyTorch.

    python3 -m sidestream.bench.gpu_shared --world 4 --device cuda

NCCL refuses two ranks on a GPU; gloo takes a GPU's tensors by way of the host. Slow, so for
correctness only: on a machine with one GPU it is how the lanes' streams, the exchange and the
gathers of several ranks come to run there.

    reference    each rank trains a plain copy on the batches of all ranks: no communication
    level        ZeRO-0 and ZeRO-3 on its own batch; weights are those of the reference, up to the
                 order of sums, and the same bits on all ranks

The last line of the output begins with RESULT. What is done between the lines `TRYING` and
`TRAINING` is torch's and gloo's alone: a failure there says nothing of sidestream.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..training.result import RESULT_PREFIX, sha256_of
from .models import DecoderConfig, build_batch
from .ranks import run_ranks
from .rivals import Setup, build_trainer
from .step_worker import check_agreement, compare_parameters

TRYING = "trying collectives"
TRAINING = "they work: training"
LEVELS = (0, 3)
STEPS = 6
CONFIG = DecoderConfig(
    layers=2, width=128, heads=4, hidden=352, vocabulary=256, sequence=32, batch=2
)
REFERENCE = "plain"


@dataclass(frozen=True, kw_only=True)
class Level:
    """What one ZeRO level came to on one rank. relative_difference: of the weights, to those of the
    reference, by their norm.
    """

    losses: list[float]
    relative_difference: float
    sha256: str


def work(rank: int, device_type: str) -> dict[str, Level]:
    """What each level came to.

    Raises:
        RuntimeError: a collective gave a wrong result, or a level did not train like the reference.
    """
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    group = dist.group.WORLD
    assert group is not None
    _tell(rank, TRYING)
    require_collectives(device)
    _tell(rank, TRAINING)
    # Of the group there is: for a GPU, init_device_mesh makes one with NCCL in some versions.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
    setup = Setup(mesh=mesh, device=device)
    reference, expected = _reference(rank, setup)
    found = {}
    for level in LEVELS:
        name = f"zero{level}"
        trainer = build_trainer(name, CONFIG, setup)
        batches = [_batch(step, rank, device) for step in range(STEPS)]
        losses = torch.stack([trainer.step(*batch) for batch in batches]).tolist()
        weights = _on_cpu(trainer.full_parameters())
        relative, _ = compare_parameters(expected, weights)
        check_agreement({REFERENCE: reference, name: losses}, relative)
        found[name] = Level(losses=losses, relative_difference=relative, sha256=sha256_of(weights))
    return found


def _tell(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def require_collectives(device: torch.device) -> None:
    """Try what training calls, on `device`, which becomes the current one.

    Raises:
        RuntimeError: one is missing or wrong.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world, rank = dist.get_world_size(), dist.get_rank()
    ranks = torch.arange(world, dtype=torch.float32, device=device)

    def all_gather(out: Tensor) -> None:
        dist.all_gather_into_tensor(out, ranks[rank : rank + 1].clone())

    def all_to_all(out: Tensor) -> None:
        dist.all_to_all_single(out, ranks[rank].repeat(world))

    def all_reduce(out: Tensor) -> None:
        out.copy_(ranks)
        dist.all_reduce(out, op=dist.ReduceOp.MAX)

    def broadcast(out: Tensor) -> None:
        out.copy_(ranks if rank == 0 else torch.zeros_like(ranks))
        dist.broadcast(out, src=0)

    def send_and_receive(out: Tensor) -> None:
        _swap(out, ranks)

    calls: list[Callable[[Tensor], None]] = [all_gather, all_to_all, all_reduce, broadcast]
    if device.type == "cpu":  # a GPU's tensors gloo can neither send nor receive
        calls.append(send_and_receive)
    for call in calls:
        out = torch.full_like(ranks, -1.0)
        call(out)
        if not torch.equal(out, ranks):
            raise RuntimeError(
                f"{call.__name__} on {device}: expected {ranks.tolist()}, got {out.tolist()}; "
                "this torch's gloo does not take tensors of that device: take another torch, or "
                "another --device"
            )


def _swap(out: Tensor, ranks: Tensor) -> None:
    """Fill `out` with every rank's own element of `ranks`, by a send and a receive a peer."""
    rank = dist.get_rank()
    out[rank] = ranks[rank]
    peers = [peer for peer in range(len(ranks)) if peer != rank]
    works = [dist.irecv(out[peer : peer + 1], peer) for peer in peers]
    works += [dist.isend(ranks[rank : rank + 1], peer) for peer in peers]
    for work in works:
        assert work is not None
        work.wait()


def _batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, targets = build_batch(CONFIG, seed=step * dist.get_world_size() + rank)
    return tokens.to(device), targets.to(device)


def _reference(rank: int, setup: Setup) -> tuple[list[float], dict[str, Tensor]]:
    """This rank's losses and the weights, of plain PyTorch on the mean of all ranks' gradients."""
    world = dist.get_world_size()
    trainer = build_trainer(REFERENCE, CONFIG, setup)
    losses = []
    for step in range(STEPS):
        for other in range(world):
            loss = trainer.module(*_batch(step, other, setup.device))
            (loss / world).backward()
            if other == rank:
                losses.append(loss.detach())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return torch.stack(losses).tolist(), _on_cpu(trainer.full_parameters())


def _on_cpu(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().cpu() for name, weight in weights.items()}


def summarise(outcomes: list[dict[str, Level]]) -> dict[str, Any]:
    """The figures of all ranks. Raises `RuntimeError` where they do not hold the same bits."""
    for name in outcomes[0]:
        held = {outcome[name].sha256 for outcome in outcomes}
        if len(held) > 1:
            raise RuntimeError(
                f"{name}: expected the same weights on {len(outcomes)} ranks, got {len(held)} "
                "different ones; the exchange or the gather is wrong: find it with pytest "
                "tests/sharding, and mend it"
            )
    first = outcomes[0]
    return {
        "world": len(outcomes),
        "steps": STEPS,
        "same_bits": len({level.sha256 for level in first.values()}) == 1,
        "levels": {
            name: {
                **asdict(level),
                "relative_difference": max(one[name].relative_difference for one in outcomes),
            }
            for name, level in first.items()
        },
    }


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    # Ranks of the device type cpu meet over gloo, whatever they compute on afterwards.
    outcomes = run_ranks(work, options.world, options.device)
    print(RESULT_PREFIX + json.dumps(summarise(outcomes)))


if __name__ == "__main__":
    main()
