"""Formats with scales through `fully_shard`: all levels, units and meshes give the same bits."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import options_of

STEPS = 3
WIRES: dict[str, dict[str, Any]] = {
    "mxfp8": {"grad_wire": "mxfp8", "param_wire": "mxfp8"},
    "fp8": {"grad_wire": "fp8", "param_wire": "fp8_1x128"},
    "nvfp4": {"grad_wire": "nvfp4", "param_wire": "nvfp4"},
    "bf16, stochastic": {"grad_wire": ss.MessageWire("bf16", rounding="stochastic")},
    "mxfp4, feedback": {"grad_wire": ss.MessageWire("mxfp4", error_feedback=torch.float32)},
    "nvfp4, all": {
        "grad_wire": ss.MessageWire("nvfp4", hadamard=True, error_feedback=torch.bfloat16, seed=7),
        "param_wire": "mxfp8",
    },
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Odd sizes, a parameter of one element, one of none."""

    def __init__(self, width: int = 23) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1, 1))
        self.none = nn.Parameter(torch.ones(0, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (x * self.gain).square().mean() + self.none.sum()


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (4, 5), generator=generator)


def trained(rank: int, wires: dict[str, Any], **options: Any) -> tuple[nn.Module, str]:
    """The model after some steps, and a hash of all its parameters and gradients."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = ss.MixedPrecisionPolicy(**wires)
    options = {"fsdp_unit_modules": [Block], **options}
    ss.fully_shard(model, optimizer, mixed_precision_policy=policy, **options)
    digest = hashlib.sha256()
    for step in range(STEPS):
        loss = model(tokens_of(rank, step))
        loss.backward()
        for param in model.parameters():
            digest.update(param.grad.full_tensor().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    for value in ss.full_state_dict(model).values():
        assert value.isfinite().all()
        digest.update(value.numpy().tobytes())
    return model, digest.hexdigest()


CUTS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero_dp_strategy": 0},
    "ZeRO-3": {"zero_dp_strategy": 3},
    "one unit": {"fsdp_unit_modules": None, "zero_dp_strategy": 2},
    "buckets": {"bucket_mib": 0.005, "overlap_grad_reduce": False, "overlap_param_gather": False},
}


def same_bits(rank: int, world_size: int, wires: dict[str, Any]) -> None:
    found = {name: trained(rank, wires, **options)[1] for name, options in CUTS.items()}
    assert len(set(found.values())) == 1, found
    plain = trained(rank, {})[1]
    assert found["ZeRO-3"] != plain


@pytest.mark.parametrize("name", WIRES)
def test_bits_do_not_depend_on_how_the_model_is_cut(name: str) -> None:
    run_on_ranks(same_bits, 3, WIRES[name])


@pytest.mark.parametrize("world_size", [1, 4])
def test_bits_at_other_worlds(world_size: int) -> None:
    run_on_ranks(same_bits, world_size, WIRES["nvfp4, all"])


def same_on_a_mesh(rank: int, world_size: int, wires: dict[str, Any], partial: Any) -> None:
    wires = {**wires, "grad_partial_dtype": partial}
    found = {}
    for name, more in {
        "ZeRO-3": {"zero_dp_strategy": 3},
        "ZeRO-1": {"zero_dp_strategy": 1},
        "HFSDP": {"zero_dp_strategy": 3, "outer_dp_sharding_strategy": "optim"},
        "one unit": {"zero_dp_strategy": 2, "fsdp_unit_modules": None},
    }.items():
        found[name] = trained(rank, wires, **options_of("HSDP"), **more)[1]
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("name", "partial"),
    [("mxfp8", torch.float32), ("nvfp4, all", torch.bfloat16), ("nvfp4, all", None)],
    ids=lambda value: str(value),
)
def test_bits_on_a_mesh(name: str, partial: Any) -> None:
    run_on_ranks(same_on_a_mesh, 4, WIRES[name], partial)
