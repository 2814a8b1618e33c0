"""Which parameter goes to which unit, and how units are cut into buckets."""

from typing import Any

import pytest
import torch
from torch import nn

from sidestream.sharding.modules.partition import GroupPlan, collect_params, partition
from sidestream.sharding.precision import MixedPrecisionPolicy
from sidestream.sharding.shard_config import UnitSizes


class Layer(nn.Module):
    def __init__(self, *numels: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel in numels)

    def forward(self) -> None:
        """Units are modules that are called."""


def plans_of(
    module: nn.Module,
    bucket_bytes: int | None = None,
    param_dtype: torch.dtype | None = None,
    split_root_bytes: int | None = None,
    classes: tuple[type[nn.Module], ...] = (Layer,),
) -> list[GroupPlan]:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    sizes = UnitSizes(bucket_bytes, split_root_bytes)
    return partition(module, collect_params(module), classes, policy, sizes)


def names_of(plan: GroupPlan) -> list[list[str]]:
    return [[entry.name.rpartition(".")[2] for entry in unit] for unit in plan.units]


BUCKETS = {
    "none": (None, None, [["0", "1", "2", "3", "4"]]),
    "filled up": (32, None, [["0", "1"], ["2", "3"], ["4"]]),
    "one each": (1, None, [["0"], ["1"], ["2"], ["3"], ["4"]]),
    "in the compute dtype": (32, torch.bfloat16, [["0", "1", "2", "3"], ["4"]]),
}


@pytest.mark.parametrize(("bucket_bytes", "dtype", "expected"), BUCKETS.values(), ids=BUCKETS)
def test_buckets_hold_as_much_as_fits(
    bucket_bytes: int | None, dtype: torch.dtype | None, expected: list[list[str]]
) -> None:
    # 4 bytes an element: two of 16 bytes fit in 32; what is larger has a bucket of its own.
    layer = Layer(4, 4, 4, 4, 40)
    assert names_of(plans_of(nn.Sequential(layer), bucket_bytes, dtype)[1]) == expected


def test_frozen_and_other_dtypes_have_units_of_their_own() -> None:
    layer = Layer(1, 1, 1, 1, 1)
    layer.values[1].requires_grad_(False)
    layer.values[2] = nn.Parameter(torch.zeros(1).bfloat16())
    layer.values[4].requires_grad_(False)
    plan = plans_of(nn.Sequential(layer))[1]
    assert names_of(plan) == [["0", "3"], ["1", "4"], ["2"]]


def test_parameters_go_to_the_nearest_unit_and_shared_ones_to_the_root() -> None:
    outer, other = Layer(1), Layer(1)
    outer.inner = Layer(2)
    outer.plain = nn.Linear(1, 1)
    outer.again = outer.plain  # twice in one unit is no reason to leave it
    other.values.append(outer.inner.values[0])
    module = nn.ModuleDict({"outer": outer, "other": other, "head": nn.Linear(1, 1, bias=False)})
    found = {
        plan.name: [entry.name for unit in plan.units for entry in unit]
        for plan in plans_of(module)
    }
    assert found == {
        "": ["outer.inner.values.0", "head.weight"],
        "outer": ["outer.values.0", "outer.plain.weight", "outer.plain.bias"],
        "other": ["other.values.0"],
    }


class Model(nn.Module):
    """Bytes in FP32: the embedding's 160, the norm's 32, the head's 160 and 40."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layer = Layer(4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)


def root_of(module: nn.Module, **options: Any) -> dict[str, list[str]]:
    """The root's units: their parameters by their names."""
    root = plans_of(module, **options)[0]
    return {root.unit_name(unit): [entry.name for entry in unit] for unit in root.units}


ROOT = ["embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]
APART = {"embedding": ROOT[:1], "norm": ROOT[1:3], "head": ROOT[3:]}
SPLITS: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {
    "none": ({}, {"(root)": ROOT}),
    "all larger": ({"split_root_bytes": 201}, {"(root)": ROOT}),
    "one": ({"split_root_bytes": 200}, {"(root)": ROOT[:3], "head": ROOT[3:]}),
    "all but what is small": ({"split_root_bytes": 160}, APART),
    "in the compute dtype": (
        {"split_root_bytes": 100, "param_dtype": torch.bfloat16},
        {"(root)": ROOT[:3], "head": ROOT[3:]},
    ),
    "no unit classes": (
        {"split_root_bytes": 1, "classes": ()},
        {"(root)": [ROOT[0], "layer.values.0", *ROOT[1:]]},
    ),
}


@pytest.mark.parametrize(("options", "expected"), SPLITS.values(), ids=SPLITS)
def test_large_modules_of_the_root_have_units_of_their_own(
    options: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    assert root_of(Model(), **options) == expected


def test_a_tied_weight_is_in_one_unit_and_what_is_frozen_does_not_count() -> None:
    tied = Model()
    tied.head.weight = tied.embedding.weight
    assert root_of(tied, split_root_bytes=160) == {
        "embedding": ["embedding.weight"],
        "(root)": ["norm.weight", "norm.bias", "head.bias"],
    }
    frozen = Model()
    frozen.embedding.weight.requires_grad_(False)
    frozen.norm.requires_grad_(False)
    assert root_of(frozen, split_root_bytes=100) == {
        "(root)": ["embedding.weight", "norm.weight", "norm.bias"],
        "head": ["head.weight", "head.bias"],
    }
