"""Modules that keep their parameters, or what they compute from them, in places of their own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins

SHAPE = (4, 5, 6)


class Two(nn.Module):
    """Multiplies by two matrices, found in `kept`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 6))
        self.second = nn.Parameter(torch.randn(6, 6))
        self.keep()

    def keep(self) -> None:
        self.kept = [self.first, self.second]

    def weights(self) -> list[Tensor]:
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights():
            x = torch.tanh(x @ weight)
        return x


class InDict(Two):
    def keep(self) -> None:
        self.kept = {"nested": [self.first], "second": self.second}

    def weights(self) -> list[Tensor]:
        return [*self.kept["nested"], self.kept["second"]]


class InParameterLists(Two):
    def keep(self) -> None:
        self.listed = nn.ParameterList([self.first])
        self.named = nn.ParameterDict({"second": self.second})

    def weights(self) -> list[Tensor]:
        return [self.listed[0], self.named["second"]]


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()  # as people do against a warning of cuDNN
        return self.rnn(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "list": Two,
    "dict": InDict,
    "parameter lists": InParameterLists,
    "LSTM": lambda: Recurrent(nn.LSTM(6, 6, 2, batch_first=True, bidirectional=True, proj_size=3)),
    "GRU": lambda: Recurrent(nn.GRU(6, 6, batch_first=True)),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral_norm hook": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
}


class Block(nn.Module):
    """A unit."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def train(rank: int, world_size: int, name: str) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(LAYERS[name]()), LAYERS[name]())
        twins = Twins(rank, world_size, model, zero, [Block])
        for step in range(2):
            inputs = twins.data(step, *SHAPE)
            # In one forward: some of these modules change their buffers in each.
            twins.plain(torch.cat(inputs)).square().mean().backward()
            twins.sharded(inputs[rank]).square().mean().backward()
            twins.check_grads()
            twins.step()
            evaluate(twins, inputs)
        twins.check_params()


def evaluate(twins: Twins, inputs: list[Tensor]) -> None:
    for model in (twins.plain, twins.sharded):
        model.eval()
    with torch.no_grad():
        expected = twins.plain(torch.cat(inputs)).chunk(twins.world_size)[twins.rank]
        torch.testing.assert_close(
            twins.sharded(inputs[twins.rank]), expected, rtol=1e-5, atol=1e-6
        )
    for model in (twins.plain, twins.sharded):
        model.train()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_a_plain_model(name: str, world_size: int) -> None:
    run_on_ranks(train, world_size, name)


class InTuple(Two):
    def keep(self) -> None:
        self.kept = (self.first, self.second)


class InAttribute(Two):
    def keep(self) -> None:
        self.__dict__["other"] = self.second


class AliasBuffer(Two):
    def keep(self) -> None:
        self.register_buffer("alias", self.second.data[1])


class TiedByData(Two):
    def keep(self) -> None:
        self.second.data = self.first.data


REFUSED = {
    InTuple: r"parameter 'layer.first': .* layer.kept\[0\]",
    InAttribute: r"parameter 'layer.second': .* layer.other",
    AliasBuffer: r"parameter 'layer.second': .* 'layer.alias' shares",
    TiedByData: r"parameter 'layer.first': .* 'layer.second' shares",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_places_that_cannot_follow_are_refused_by_name(kind: type[Two]) -> None:
    model = Block(kind())
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=REFUSED[kind]):
        ss.fully_shard(model)
    after = dict(model.named_parameters())
    assert all(before[name] is after[name] for name in before)


class Halves(Two):
    """Two parameters in the columns of one tensor: their memory is interleaved, but not shared."""

    def keep(self) -> None:
        whole = torch.randn(6, 12)
        self.first = nn.Parameter(whole[:, :6])
        self.second = nn.Parameter(whole[:, 6:])

    def weights(self) -> list[Tensor]:
        return [self.first, self.second]


def test_parameters_beside_each_other_in_one_tensor_are_taken() -> None:
    x = torch.randn(2, 6)
    model = Halves()
    expected = model(x)
    ss.fully_shard(model)
    torch.testing.assert_close(model(x), expected)
