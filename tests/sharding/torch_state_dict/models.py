"""What tests of torch's state-dict API train, plain and sharded, and how they compare it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import sidestream
from sidestream.tests import ranks

Both = tuple[nn.Module, torch.optim.Optimizer]
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
MARKS = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
ranks.preload("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


def make_plain(seed: int, shape: tuple[int, int] = (5, 7)) -> Both:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, shape[0]), nn.ReLU(), nn.Linear(*shape), nn.ReLU())
    model.append(nn.Linear(shape[1], 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def make_sharded(seed: int, zero: int, **options: Any) -> Both:
    model, optimizer = make_plain(seed)
    options = {"fsdp_unit_modules": [nn.Linear], **options}
    sidestream.fully_shard(model, optimizer, zero_dp_strategy=zero, **options)
    return model, optimizer


def train(both: Both, seed: int = 0) -> Both:
    model, optimizer = both
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).sum().backward()
    round_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return both


def round_gradients(model: nn.Module) -> None:
    """To bfloat16: the average over three ranks, a third of a sum, has other bits than a plain
    model's gradient.
    """
    for param in model.parameters():
        if param.grad is not None:
            param.grad.copy_(param.grad.bfloat16())


def whole(both: Both) -> list[Tensor]:
    """Every parameter, moment and counter."""
    model, optimizer = both
    tensors = list(model.parameters())
    for param in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[param].items())]
    return [getattr(x, "full_tensor", lambda x=x: x)().detach().clone() for x in tensors]


def are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts, lists and tuples, by their paths."""
    if isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        parts = (flat(value, f"{prefix}.{key}") for key, value in items)
        return {key: value for part in parts for key, value in part.items()}
    return {prefix: state}
