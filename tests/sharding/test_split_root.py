"""Large modules of the root have units of their own: exchanged in their turn, gathered with the
root for whoever uses their weights in another way than by calling them.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.trace import Kind
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Block, Transformer, batch, loss_of
from sidestream.tests.sharding.twins import LEVELS, Twins

SPLIT = {"split_root_mib": 0.0001}


class Model(nn.Module):
    """Blocks between an embedding and a head, and another way to use what these hold."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.embedding = nn.Linear(6, 8, bias=False)
        self.blocks = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 6, bias=False)
        if use == "tied":
            self.head.weight = nn.Parameter(torch.randn(8, 8))
            self.embedding.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "tied":
            x = nn.functional.pad(x, (0, 2))
        if self.use == "embedding as head":
            hidden = self.blocks(self.embedding(x))
            return self.head(hidden) + nn.functional.linear(hidden, self.embedding.weight.t())
        if self.use == "head never called":
            return nn.functional.linear(self.blocks(self.embedding(x)), self.head.weight)
        if self.use == "weights in the loss":
            return self.head(self.blocks(self.embedding(x))).mean() + self.head.weight.sin().mean()
        return self.head(self.blocks(self.embedding(x)))


USES = [
    "called",
    "tied",
    "embedding as head",
    "head never called",
    "weights in the loss",
]


def _train(rank: int, world_size: int, use: str) -> None:
    for zero in LEVELS[world_size]:
        for options in ({}, {"reshard_after_forward": True}):
            twins = Twins(rank, world_size, Model(use), zero, [nn.LayerNorm], **SPLIT, **options)
            names = [unit.spec.name for unit in twins.runtime.units]
            assert names[0] == ("(root)" if use == "tied" else "embedding"), names
            twins.train(lambda model, x: model(x).square().mean(), (4, 6))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("use", USES)
def test_it_trains_as_the_plain_twin_however_its_weights_are_used(
    use: str, world_size: int
) -> None:
    run_on_ranks(_train, world_size, use)


def _exchanges(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block], **options)
    runtime = runtime_of(model)
    for step in range(2):
        runtime.trace.steps = []
        loss_of(model, batch(step, rank=rank, world_size=world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        runtime.units[unit].spec.name for kind, unit in runtime.trace.steps if kind is Kind.EXCHANGE
    ]


def test_the_head_is_exchanged_first_and_the_embedding_last() -> None:
    blocks = ["blocks.2", "blocks.1", "blocks.0"]
    whole, split = ({"split_root_mib": None}, SPLIT)
    assert run_on_ranks(_exchanges, 2, whole) == 2 * [[*blocks, "(root)"]]
    assert run_on_ranks(_exchanges, 2, split) == 2 * [["head", *blocks, "embedding"]]


def test_what_is_large_is_apart_unless_it_is_switched_off() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(2048, 2048)  # 16 MiB
            self.block = nn.Linear(2, 2)
            self.norm = nn.LayerNorm(2048)

        def forward(self, tokens: Tensor) -> Tensor:
            raise AssertionError("only sharded")

    for options, names in (
        ({}, ["embedding", "norm", "block"]),
        ({"split_root_mib": None}, ["(root)", "block"]),
        ({"split_root_mib": 16.001}, ["(root)", "block"]),
    ):
        model = Large()
        ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], **options)
        assert [unit.spec.name for unit in runtime_of(model).units] == names
