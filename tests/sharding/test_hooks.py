"""The dtypes that a policy asks for hold in every container, of what goes in and what comes out."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks

BF16 = torch.bfloat16


class Pair(NamedTuple):
    first: Tensor
    second: int


@dataclass(frozen=True)
class Both:
    value: Tensor
    text: str = "as it was"


class Nests(nn.Module):
    """Gives its input on in one container in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return OrderedDict(
            plain=y,
            pair=(y + 1, [y * 2, None]),
            named=Pair(y - 1, 3),
            data=Both(y.tanh()),
            inner={"index": y.argmax(-1)},
        )


def leaves_of(output: dict[str, Any]) -> list[Tensor]:
    pair, named, data = output["pair"], output["named"], output["data"]
    return [output["plain"], pair[0], pair[1][0], named.first, data.value, output["inner"]["index"]]


def outputs_are_cast(rank: int, world_size: int) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for zero in range(4):
        torch.manual_seed(0)
        plain, model = Nests(), Nests()
        model.load_state_dict(plain.state_dict())
        policy = ss.MixedPrecisionPolicy(output_dtype=BF16)
        ss.fully_shard(model, zero_dp_strategy=zero, mixed_precision_policy=policy)
        output, expected = model(x), plain(x)
        assert type(output) is OrderedDict and type(output["pair"]) is tuple
        assert type(output["named"]) is Pair and output["named"].second == 3
        assert output["data"] == Both(output["data"].value) and output["pair"][1][1] is None
        *floats, index = leaves_of(output)
        *expected_floats, expected_index = leaves_of(expected)
        assert torch.equal(index, expected_index) and index.dtype == torch.int64
        for value, other in zip(floats, expected_floats, strict=True):
            assert value.dtype == BF16
            assert torch.equal(value, other.to(BF16))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_floats_of_the_output_have_the_output_dtype_in_every_container(world_size: int) -> None:
    run_on_ranks(outputs_are_cast, world_size)


class Sees(nn.Module):
    """Notes the dtypes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, given: dict[str, Any], *, more: tuple[Tensor, Both]) -> Tensor:
        self.seen = [given["x"].dtype, given["index"].dtype, more[0].dtype, more[1].value.dtype]
        return self.linear(given["x"] + more[0] + more[1].value)[given["index"]]


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sees()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.head(self.inner({"x": x, "index": torch.tensor([1, 0])}, more=(x, Both(x))))


@pytest.mark.parametrize("casts", [True, False], ids=["cast", "not cast"])
@pytest.mark.parametrize("zero", range(4))
def test_floats_of_a_units_inputs_have_its_compute_dtype(zero: int, casts: bool) -> None:
    model = Passes()
    policy = ss.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=casts)
    ss.fully_shard(
        model, fsdp_unit_modules=[Sees], zero_dp_strategy=zero, mixed_precision_policy=policy
    )
    if casts:
        assert model(torch.randn(3, 6)).dtype == BF16
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.randn(3, 6))
    float_dtype = BF16 if casts else torch.float32
    assert model.inner.seen == [float_dtype, torch.int64, float_dtype, float_dtype]
