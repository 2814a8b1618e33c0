"""A tiny training of one or several ranks under the machine, with simulated restarts."""

import io
from typing import Any

import torch
from torch import nn

from sidestream.training.rerun import ExitDecision, RerunDataIterator, RerunStateMachine

NUM_STEPS, NUM_MICROBATCHES = 5, 2


class Training:
    """Plain SGD with dropout; a step's data are drawn from (step, rank)."""

    def __init__(self, rank: int = 0, *, fatal: bool = True, **options: Any) -> None:
        torch.manual_seed(rank)
        self.rank, self.fatal = rank, fatal
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.machine = RerunStateMachine(self.model, **options)
        self.runs: list[int] = []

    def data(self) -> RerunDataIterator:
        generator = torch.Generator().manual_seed(100 * self.machine.step + self.rank)
        return RerunDataIterator(torch.randn(2, 4, generator=generator) for _ in iter(int, 1))

    def step(self) -> ExitDecision:
        """One step; the optimizer steps unless it is to exit."""
        data = self.data()
        while self.machine.should_run_forward_backward(data):
            self.runs.append(self.machine.step)
            self.optimizer.zero_grad()
            for _ in range(NUM_MICROBATCHES):
                loss = self.model(next(data)).square().mean()
                self.machine.validate_result(loss, torch.isnan, "loss", fatal=self.fatal)
                loss.backward()
        decision = self.machine.should_checkpoint_and_exit()
        if not decision.exit:
            self.optimizer.step()
        return decision

    def train(self, last_step: int = NUM_STEPS) -> ExitDecision:
        """Until the last step has been made, or an exit."""
        while self.machine.step <= last_step:
            decision = self.step()
            if decision.exit:
                return decision
        return decision

    def saved(self) -> dict[str, Any]:
        """A checkpoint, as it comes back from a file."""
        buffer = io.BytesIO()
        state = {"model": self.model.state_dict(), "rerun": self.machine.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state()}, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def load(self, saved: dict[str, Any], *, with_rng: bool = True) -> None:
        self.model.load_state_dict(saved["model"])
        self.machine.load_state_dict(saved["rerun"])
        if with_rng:
            torch.set_rng_state(saved["rng"])
        else:
            torch.manual_seed(12345)

    def params(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
