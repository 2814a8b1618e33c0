"""Sharded models under the machine: a step that runs again has the bits of its first run, and
checkpoints of sidestream carry what each rank has to know.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.checkpoint.wires import wires_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.training.rerun import (
    InjectedFault,
    RerunDataIterator,
    RerunStateMachine,
    Verdict,
    VerdictKind,
)

WIRE = ss.MessageWire("mxfp8", rounding="stochastic", error_feedback=torch.float32)
LAST_STEP = 3
SLOW = pytest.mark.slow


class Training:
    def __init__(self, rank: int, zero: int, *, saves: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        norm = nn.LayerNorm if saves else nn.BatchNorm1d  # each rank's buffers are its own
        model = nn.Sequential(nn.Linear(20, 32), norm(32), nn.Dropout(0.3), nn.Linear(32, 20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = ss.fully_shard(
            model,
            optimizer,
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=zero,
            mixed_precision_policy=ss.MixedPrecisionPolicy(grad_wire=WIRE),
        )
        self.rank = rank
        self.machine = RerunStateMachine(self.model, **options)

    def step(self, *, fatal: bool, spoils: int | None = None) -> tuple[bool, bool, int]:
        """One step. spoils: which run of it has a loss that is NaN, and gradients of it."""
        step, runs = self.machine.step, 0
        generator = torch.Generator().manual_seed(10 * step + self.rank)
        data = RerunDataIterator(torch.randn(6, 20, generator=generator) for _ in range(2))
        torch.manual_seed(1000 * step + self.rank)
        while self.machine.should_run_forward_backward(data):
            for last in (False, True):
                with torch.enable_grad() if last else ss.no_sync(self.model):
                    loss = self.model(next(data)).square().mean()
                    if runs == spoils and self.rank == 1:
                        loss = loss * float("nan")
                    self.machine.validate_result(loss, torch.isnan, "loss", fatal=fatal)
                    loss.backward()
            runs += 1
        decision = self.machine.should_checkpoint_and_exit()
        if not decision.exit:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return decision

    def bits(self) -> list[torch.Tensor]:
        """Of all that the training goes on with."""
        found = [x.full_tensor() for x in self.model.parameters()]
        found += [x.clone() for x in self.model.buffers()]
        return found + [owed.tensor.clone() for owed in wires_of(self.model).owed.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def bits_of(rank: int, zero: int, *, spoils: int | None = None, **options: Any) -> Any:
    training = Training(rank, zero, **options)
    for step in range(1, LAST_STEP + 1):
        training.step(fatal=False, spoils=spoils if step == 2 else None)
    return training.bits(), training.machine.verdict


def runs_again(rank: int, world_size: int, levels: list[int]) -> None:
    reference, _ = bits_of(rank, 0, mode="disabled")
    for zero in levels:
        twice, _ = bits_of(rank, zero, mode="report_determinism_stats")
        assert same(twice, reference), zero
    mended, verdict = bits_of(rank, levels[-1], spoils=0)
    assert same(mended, reference)
    assert verdict.kind is VerdictKind.TRANSIENT and verdict.suspects[0].rank == 1


LEVELS = [pytest.param([0, 3], id="zero0,3"), pytest.param([1, 2], id="zero1,2", marks=SLOW)]


@pytest.mark.parametrize("levels", LEVELS)
def test_a_run_again_has_the_bits_of_the_first(levels: list[int]) -> None:
    run_on_ranks(runs_again, 2, levels)


def restarted(rank: int, world_size: int, folder: str, kind: str) -> list[Any]:
    """Two processes' worth: the exit code of each, the verdict, and the bits after it."""
    fault = InjectedFault(kind, 2, rank=1, call=1, hardware="place 1")
    path = Path(folder) / kind
    training = Training(
        rank, 3, saves=True, injector=fault, hardware=f"place {rank}", program="test"
    )
    for _ in range(2):
        decision = training.step(fatal=True)
    codes = [decision.code]
    assert decision.checkpoint
    ss.save_checkpoint(
        path, training.model, training.optimizer, extra=training.machine.state_dict()
    )
    training = Training(
        rank, 3, saves=True, injector=fault, hardware=f"place {1 - rank}", program="test"
    )
    extra = ss.load_checkpoint(path, training.model, training.optimizer)
    with pytest.raises(ValueError, match="rank: expected"):
        training.machine.validate_state_dict({**extra, "rank": 1 - rank})
    training.machine.load_state_dict(extra)
    torch.manual_seed(4321)
    for _ in range(2, LAST_STEP + 1):
        decision = training.step(fatal=True)
        codes.append(decision.code)
        if decision.exit:
            break
    if decision.exit:
        # What is saved then goes on as if nothing had happened.
        ss.save_checkpoint(
            path, training.model, training.optimizer, extra=training.machine.state_dict()
        )
        training = Training(rank, 3, saves=True, program="test")
        training.machine.load_state_dict(
            ss.load_checkpoint(path, training.model, training.optimizer)
        )
        for _ in range(2, LAST_STEP + 1):
            training.step(fatal=True)
    reference, _ = bits_of(rank, 3, mode="disabled", saves=True)
    assert same(training.bits(), reference)
    return [codes, training.machine.verdict]


CODES = {"transient": [17, 0, 0], "persistent": [16, 17], "bug": [16, 17]}


KINDS = ["persistent", *(pytest.param(kind, marks=SLOW) for kind in ("transient", "bug"))]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_carry_what_each_rank_has_to_know(kind: str, tmp_path: Path) -> None:
    for codes, verdict in run_on_ranks(restarted, 2, str(tmp_path), kind):
        assert isinstance(verdict, Verdict)
        assert codes == CODES[kind] and verdict.kind.value == kind
        assert (verdict.step, verdict.suspects[0].rank) == (2, 1)
        assert verdict.suspects[0].hardware == ("place 1",)
