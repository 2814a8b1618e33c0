"""What wires keep between steps in checkpoints: resumption with the same bits, other world sizes,
and what is refused.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import format_utils

import sidestream as ss
from sidestream.sharding.checkpoint.wires import wires_of
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks

WIRES = {
    "nvfp4, feedback in fp32": ss.MessageWire("nvfp4", error_feedback=torch.float32),
    "mxfp8, feedback in bf16": ss.MessageWire("mxfp8", error_feedback=torch.bfloat16),
    "mxfp4": ss.MessageWire("mxfp4"),
}
FEEDBACK = WIRES["mxfp8, feedback in bf16"]


def make(wire: Any, zero: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 23), nn.Tanh(), nn.Linear(23, 19, bias=False))
    model[0].empty = nn.Parameter(torch.empty(0, 5))
    optimizer = ss.AdamW(model.parameters(), lr=0.05)
    ss.fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=zero,
        mixed_precision_policy=ss.MixedPrecisionPolicy(grad_wire=wire),
        **options,
    )
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        x = torch.randn(3, 19, generator=torch.Generator().manual_seed(10 * step + rank))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def owed(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.tensor.clone() for name, one in wires_of(model).owed.items()}


def resumed(rank: int, world_size: int, path: Path, wire: str, asynchronous: bool) -> None:
    model, optimizer = make(WIRES[wire])
    train(model, optimizer, rank, range(3))
    saved = owed(model)
    assert set(saved) == ({"0.weight", "2.weight", "0.empty"} if "feedback" in wire else set())
    assert all(value.any() for value in saved.values() if value.numel())
    if asynchronous:
        future = ss.save_checkpoint(path, model, optimizer, asynchronous=True)
        train(model, optimizer, rank, range(3, 5))  # changes nothing of what is written
        future.result()
    else:
        ss.save_checkpoint(path, model, optimizer)
        train(model, optimizer, rank, range(3, 5))
    other, its_optimizer = make(WIRES[wire], zero=1)
    train(other, its_optimizer, rank, range(7, 8))
    ss.load_checkpoint(path, other, its_optimizer)
    for name, value in owed(other).items():
        assert torch.equal(value, saved[name]), name
    train(other, its_optimizer, rank, range(3, 5))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
    for name, value in owed(other).items():
        assert torch.equal(value, owed(model)[name]), name


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_training_that_was_resumed_has_the_same_bits(
    tmp_path: Path, wire: str, asynchronous: bool
) -> None:
    run_on_ranks(resumed, 2, tmp_path / "c", wire, asynchronous)


def save(rank: int, world_size: int, path: Path, wire: Any, options: Any) -> dict[str, Tensor]:
    model, optimizer = make(wire, **options)
    train(model, optimizer, rank, range(2))
    ss.save_checkpoint(path, model, optimizer)
    return owed(model)


def load(rank: int, world_size: int, path: Path, wire: Any, options: Any) -> dict[str, Tensor]:
    model, optimizer = make(wire, **options)
    ss.load_checkpoint(path, model, optimizer)
    assert runtime_of(model).exchange_order.backwards == 2
    return owed(model)


@pytest.mark.parametrize("factor", [None, 5.0], ids=["means", "sums"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)], ids=["1 to 2", "3 to 2"])
def test_other_ranks_owe_the_same_together(
    tmp_path: Path, before: int, after: int, factor: float | None
) -> None:
    wire = WIRES["nvfp4, feedback in fp32"]
    options = {"gradient_divide_factor": factor}
    old = run_on_ranks(save, before, tmp_path / "c", wire, options)
    new = run_on_ranks(load, after, tmp_path / "c", wire, options)
    for name in old[0]:
        debts = [sum(one[name] for one in ranks) / (factor or len(ranks)) for ranks in (old, new)]
        torch.testing.assert_close(debts[1], debts[0], rtol=1e-6, atol=0)
        assert all(torch.equal(one[name], new[0][name]) for one in new)


def refusals(rank: int, world_size: int, folder: Path) -> None:
    with_debt, without = folder / "with", folder / "without"
    save(rank, world_size, with_debt, FEEDBACK, {})
    save(rank, world_size, without, "mxfp8", {})
    model, optimizer = make(FEEDBACK)
    train(model, optimizer, rank, range(1))
    before = [param.to_local().clone() for param in model.parameters()], owed(model)
    text = "error feedback: expected what is owed to 0.weight, 0.empty, 2.weight, got none; pass"
    for strict in (True, False):
        with pytest.raises(ValueError, match=re.escape(text)):
            ss.load_checkpoint(without, model, optimizer, strict=strict)
    assert all(map(torch.equal, [p.to_local() for p in model.parameters()], before[0]))
    assert all(torch.equal(value, before[1][name]) for name, value in owed(model).items())
    for path in (without, with_debt):
        train(model, optimizer, rank, range(1))
        ss.load_checkpoint(path, model, optimizer, reset_error_feedback=True)
        assert not any(value.any() for value in owed(model).values())

    plain, its_optimizer = make("mxfp8")
    text = "error feedback that the model's wires do not have: 0.weight, 0.empty, 2.weight"
    with pytest.raises(ValueError, match=re.escape(text)):
        ss.load_checkpoint(with_debt, plain, its_optimizer)
    with pytest.warns(UserWarning, match=re.escape(text)):
        ss.load_checkpoint(with_debt, plain, its_optimizer, strict=False)
    ss.load_checkpoint(with_debt, plain, its_optimizer, reset_error_feedback=True)


def test_feedback_on_one_side_alone_is_refused(tmp_path: Path) -> None:
    run_on_ranks(refusals, 2, tmp_path)


def test_other_readers_and_writers(tmp_path: Path) -> None:
    (saved,) = run_on_ranks(save, 1, tmp_path / "c", FEEDBACK, {})
    # A module that exchanges nothing has no use for it.
    plain = nn.Sequential(nn.Linear(19, 23), nn.Tanh(), nn.Linear(23, 19, bias=False))
    plain[0].empty = nn.Parameter(torch.empty(0, 5))
    ss.load_checkpoint(tmp_path / "c", plain)
    # torch.distributed.checkpoint reads and converts the whole.
    target = {"wires": {"0": {name: torch.ones_like(value) for name, value in saved.items()}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "c")
        format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "whole.pt")
    for name, value in saved.items():
        assert torch.equal(target["wires"]["0"][name], value)
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert whole["wires"]["backwards"] == [2]
    # What torch.distributed.checkpoint wrote without any of it needs no number.
    model, _ = make("nvfp4")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, range(0))
    runtime_of(model).exchange_order.backwards = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain")
    ss.load_checkpoint(tmp_path / "plain", model)
    assert runtime_of(model).exchange_order.backwards == 7


def test_what_is_no_count_is_refused(tmp_path: Path) -> None:
    model, _ = make("nvfp4")
    for count in (-1, "1", None):
        state = {"model": model.state_dict(), "wires": {"backwards": count}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=tmp_path / f"{count}")
        with pytest.raises(ValueError, match="expected counts"):
            ss.load_checkpoint(tmp_path / f"{count}", model)


def skipping(rank: int, world_size: int) -> None:
    """A step that is left out leaves nothing owed to its gradients, nor does a reset."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(19, 23), nn.Linear(23, 19))
    policy = ss.MixedPrecisionPolicy(grad_wire=FEEDBACK, nonfinite_grads="skip")
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], mixed_precision_policy=policy)
    first, second = (
        ss.fully_shard_optimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in model
    )
    x = torch.randn(3, 19)
    model(x).square().mean().backward()
    assert all(value.any() for value in owed(model).values())
    model[0].weight.grad.fill_(torch.nan)
    first.step()
    second.step()
    assert [bool(value.any()) for value in owed(model).values()] == [False, True]
    ss.reset_error_feedback(model)
    assert not any(value.any() for value in owed(model).values())
    # What is not finite is not owed either.
    (model(x * (torch.inf if rank else 1.0)).sum()).backward()
    assert all(value.isfinite().all() for value in owed(model).values())


def test_a_step_that_is_left_out_owes_nothing() -> None:
    run_on_ranks(skipping, 2)
