"""A whole checkpoint, and what loading a damaged copy of it tells."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import named_state

EXTRA = {"step": 7, "note": "a text"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 6)
        self.third = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.norm(self.first(x))))


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    ss.fully_shard(model, optimizer)
    for _ in range(seed + 1):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A sum over all that a checkpoint holds."""
    total = hashlib.sha256()
    named = named_state(names_of_params(model), optimizer)
    for name, tensor in ss.full_state_dict(model).items():
        total.update(name.encode() + tensor.numpy().tobytes())
    for name, entries in named["state"].items():
        for key, value in sorted(entries.items()):
            local = getattr(value, "local", value)
            total.update(f"{name} {key}".encode() + local.numpy().tobytes())
    total.update(repr(named["param_groups"]).encode())
    return total.hexdigest()


@dataclass
class Case:
    """A whole checkpoint, what loading it gives, and a model to load into."""

    folder: Path
    extra: Any
    expected: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def try_to_load(self, folder: Path) -> str:
        """The error's message, or "loaded"."""
        before = everything(self.model, self.optimizer)
        try:
            extra = ss.load_checkpoint(folder, self.model, self.optimizer)
        except (ValueError, OSError) as error:
            assert everything(self.model, self.optimizer) == before, "changed, though refused"
            assert "\n  " in str(error) or "\n" not in str(error), "more than a line"
            assert str(folder) in str(error), error
            return str(error)
        assert everything(self.model, self.optimizer) == self.expected, "loaded something else"
        assert extra == self.extra
        ss.load_checkpoint(self.folder.with_name("before"), self.model, self.optimizer)
        assert everything(self.model, self.optimizer) == before
        return "loaded"


def damaged(case: Case, name: str, content: bytes, tmp_path: Path) -> str:
    """What loading tells when file `name` holds `content` instead."""
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(case.folder, folder)
    (folder / name).write_bytes(content)
    return case.try_to_load(folder)
