"""Gradients that are not strided: they count as the dense ones they stand for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins

ROWS, WIDTH = 11, 5


class SparseGradient(torch.autograd.Function):
    """A product whose gradient for the weight is sparse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, -2).T @ grads[0].flatten(0, -2)
        return grads[0] @ weight.T, rows.to_sparse()


class SparseProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return SparseGradient.apply(x, self.weight)


class Model(nn.Module):
    """Sparse tables, one of them tied to a dense head, and one that not every rank uses."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        self.tied = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.body = SparseProduct() if sparse else nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, ROWS)
        self.head.weight = self.tied.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.bag(tokens).unsqueeze(1)
        if tokens.sum() % 2:
            x = x + self.tied(tokens)
        return self.head(torch.tanh(self.body(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def models() -> tuple[nn.Module, nn.Module]:
    """One with sparse gradients and its dense twin, of the same weights."""
    torch.manual_seed(0)
    sparse, dense = Model(sparse=True), Model(sparse=False)
    state = sparse.state_dict()
    state["body.weight"] = state["body.weight"].T
    dense.load_state_dict(state)
    return sparse, dense


def tokens_of(step: int, world_size: int) -> list[Tensor]:
    return [
        torch.randint(0, ROWS, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        for rank in range(world_size)
    ]


def trains_as_dense(rank: int, world_size: int) -> None:
    for zero in range(4):
        for accumulate in (1, 2):
            sparse, dense = models()
            twins = Twins(rank, world_size, sparse, zero, [nn.Embedding, SparseProduct])
            twins.plain = dense
            twins.plain_optimizer = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                for microbatch in range(accumulate):
                    inputs = tokens_of(2 * step + microbatch, world_size)
                    if microbatch < accumulate - 1:
                        with ss.no_sync(sparse):
                            twins.backward(loss_of, inputs)
                    else:
                        twins.backward(loss_of, inputs)
                twins.step()
            trained = ss.full_state_dict(sparse)
            trained["body.weight"] = trained["body.weight"].T
            for name, value in dense.state_dict().items():
                torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sparse_gradients_train_as_dense_ones_do(world_size: int) -> None:
    run_on_ranks(trains_as_dense, world_size)
