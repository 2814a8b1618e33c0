"""Steps as CUDA graphs on a GPU, over NCCL: the bits of the steps themselves, with dropout, several
microbatches and two shapes of input. On a CPU the same trainings run without graphs.

One rank, over a group of its own, has all the streams, waits and collectives that several have.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.data_parallel_groups import ONE_RANK_VARIABLE
from sidestream.tests.ranks import run_on_ranks
from sidestream.training.graphs import CaptureError, FullStepGraph
from sidestream.training.result import sha256_of

WIDTH, MICROBATCHES = 192, 2
ROWS = (64, 64, 64, 48, 48, 64, 48, 48)  # of each step's microbatches
# What torch.empty hands out is filled on the current stream, which need not be its owner's.
UNPOISONED = {"SIDESTREAM_TEST_POISON": "0", ONE_RANK_VARIABLE: "1"}


@dataclass(frozen=True)
class Case:
    zero: int | None
    policy: dict[str, Any] = field(default_factory=dict)
    overlap: bool | str = True
    asks: bool = False
    adamw: bool = False


CASES = {
    "zero0": Case(0),
    "zero2, bf16, pipelined": Case(2, {"param_dtype": torch.bfloat16}, "pipelined", adamw=True),
    "zero3": Case(3),
    "zero3, mxfp8": Case(3, {"grad_wire": "mxfp8"}),
    "zero3, no overlap": Case(3, overlap=False),
    "not sharded": Case(None),
    # The last one, since torch 2.11 records nothing more after it.
    "refused": Case(3, asks=True),
}


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.adamw:
        return ss.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(case: Case, device: torch.device, *, with_graphs: bool) -> tuple[str, list[float], int]:
    """The weights' hash, the losses, and how many graphs there were."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(6)]
    model = nn.Sequential(*blocks).to(device)
    optimizer = _optimizer(case, model)
    if case.zero is not None:
        ss.fully_shard(
            model,
            optimizer,
            zero_dp_strategy=case.zero,
            fsdp_unit_modules=[nn.Linear],
            mixed_precision_policy=ss.MixedPrecisionPolicy(**case.policy),
            overlap_grad_reduce=case.overlap,
            overlap_param_gather=bool(case.overlap),
        )

    def step(batches: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=device)
        for place, inputs in enumerate(batches):
            loss = model(inputs).float().square().mean() / len(batches)
            waits = case.zero is not None and place + 1 < len(batches)
            with ss.no_sync(model) if waits else contextlib.nullcontext():
                loss.backward()
            total += loss.detach()
        if case.asks:
            total.item()
        return total

    failure = "eager" if case.asks else "raise"
    run = FullStepGraph(step, [model], warmup_steps=1, on_failure=failure) if with_graphs else step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number, rows in enumerate(ROWS):
        batches = [torch.randn(rows, WIDTH, generator=generator) for _ in range(MICROBATCHES)]
        if not with_graphs or device.type == "cpu":
            batches = [batch.to(device) for batch in batches]
        elif number % 2:
            batches = [batch.pin_memory() for batch in batches]
        losses.append(run(batches))
        if number % 3 == 0:
            with torch.no_grad():
                model(batches[0].to(device))
        optimizer.step()
        optimizer.zero_grad()
    num_graphs = run.num_graphs if isinstance(run, FullStepGraph) else 0
    weights = {
        name: (param.full_tensor() if isinstance(param, ss.ShardedTensor) else param).detach().cpu()
        for name, param in model.named_parameters()
    }
    assert all(weight.isfinite().all() for weight in weights.values())
    return sha256_of(weights), [loss.item() for loss in losses], num_graphs


def _compare(rank: int, world_size: int, device_type: str) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    for name, case in CASES.items():
        expected, losses, _ = _train(case, device, with_graphs=False)
        found, found_losses, num_graphs = _train(case, device, with_graphs=True)
        assert found_losses == losses, name
        assert found == expected, name
        assert num_graphs == (0 if case.asks or device_type == "cpu" else 2), name
    if device_type == "cuda":
        model = nn.Linear(2, 2, device=device)
        graphed = FullStepGraph(lambda x: model(x).sum().item(), [model], warmup_steps=1)
        graphed(torch.ones(1, 2))
        with pytest.raises(CaptureError, match=r"only enqueues work on the GPU, got \w+: "):
            graphed(torch.ones(1, 2))


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("device", "world"),
    [
        pytest.param("cpu", 1, marks=pytest.mark.slow),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=pytest.mark.gpu),
    ],
)
def test_graphs_have_the_bits_of_steps(device: str, world: int) -> None:
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks need as many GPUs")
    backend = "nccl" if device == "cuda" else "gloo"
    run_on_ranks(_compare, world, device, backend=backend, env=UNPOISONED)
