"""`explain` says what a model is doing, from wherever it is asked, and changes nothing."""

import threading
import time

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.sharding.explanation import Explanation, Lasting, UnitExplanation
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Job, batch, build, loss_of, run_step

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
NAMES = ("(root)", *BLOCKS)


def states(explanation: Explanation) -> dict[str, str]:
    return {unit.name: unit.state for unit in explanation.units}


def test_at_rest_nothing_waits() -> None:
    model, _ = build(Job(zero=3))
    found = ss.explain(model)
    assert found.units == tuple(UnitExplanation(name, "sharded") for name in NAMES)
    assert (found.rank, found.world_size, found.num_exchanged) == (0, 1, 0)
    assert (found.waits, found.in_flight) == ((), ())
    assert str(found).splitlines() == [
        "rank 0 of 1: outside forward and backward",
        "  waits in no collective",
        "  in flight: nothing",
        "  sharded, with nothing to wait for: 4 units",
        "  exchanges, in order: blocks.2, blocks.1, blocks.0, (root)",
    ]


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the module that was passed to fully_shard"):
        ss.explain(nn.Linear(2, 2))


def asked_inside(rank: int, world_size: int, zero: int) -> list[Explanation]:
    """In the forward of block 1, and after its backward."""
    model, _ = build(Job(zero=zero))
    found: list[Explanation] = []

    def ask(*_: object) -> None:
        found.append(ss.explain(model))

    middle = model.get_submodule("blocks.1")
    middle.register_forward_pre_hook(ask)
    middle.register_full_backward_hook(ask)
    loss_of(model, batch(0, rank=rank, world_size=world_size)).backward()
    ask()
    return found


@pytest.mark.parametrize("zero", [3, 2])
def test_forward_and_backward_say_where_they_are(zero: int) -> None:
    for forward, backward, after in run_on_ranks(asked_inside, 2, zero):
        assert forward.doing == "in the forward of 'blocks.1'"
        assert states(forward)["blocks.1"] == "gathered"
        assert states(forward)["blocks.2"] == "gathering"
        # Rank 0's values have been everybody's since the start, so at ZeRO-2 nothing moves.
        moving = ["gather of unit 'blocks.2'"] if zero == 3 else []
        assert [work.what for work in forward.in_flight] == moving
        assert all(work.ranks == (0, 1) for work in forward.in_flight)
        assert backward.doing.startswith("in a backward, ")
        lacking = {unit.name: unit.lacks_grads_of for unit in backward.units}
        assert lacking["blocks.2"] == ()
        assert "blocks.0.gain" in lacking["blocks.0"]
        assert "embedding.weight" in lacking["(root)"]
        assert "head.weight" not in lacking["(root)"]
        begun = backward.exchange_order[: backward.num_exchanged]
        assert begun[:1] == ("blocks.2",)
        assert "blocks.0" not in begun
        assert after.doing == "outside forward and backward"
        assert after.in_flight == ()


def test_sums_and_open_blocks_are_told() -> None:
    model, optimizer = build(Job(zero=2))
    with ss.no_sync(model):
        loss_of(model, batch(0)).backward()
        inside = ss.explain(model)
    assert inside.doing == "outside forward and backward, under no_sync"
    assert all(unit.holds_sum for unit in inside.units)
    assert "unit 'blocks.0': sharded; holds a sum of no_sync that was not exchanged" in str(inside)
    optimizer.zero_grad()
    with ss.gathered(model.get_submodule("blocks.1")):
        whole = [unit.name for unit in ss.explain(model).units if unit.is_whole]
    assert whole == ["blocks.1"]
    assert not any(unit.is_whole or unit.holds_sum for unit in ss.explain(model).units)


def one_rank_is_late(rank: int, world_size: int) -> Explanation | None:
    """Rank 0 asks from another thread while it waits for rank 1."""
    model, optimizer = build(Job(zero=3))
    answers: list[Explanation] = []

    def ask() -> None:
        while not answers:
            found = ss.explain(model)
            if found.waits and found.waits[0].lasting_s > 0.2:
                answers.append(found)

    asking = threading.Thread(target=ask)
    if rank == 0:
        asking.start()
    else:
        time.sleep(1.5)
    run_step(model, optimizer, Job(zero=3), 0, rank, world_size)
    if rank == 0:
        asking.join()
        return answers[0]
    return None


def test_a_rank_that_waits_tells_for_whom_from_another_thread() -> None:
    found = run_on_ranks(one_rank_is_late, 2)[0]
    (wait,) = found.waits
    assert wait.what == "gather of unit '(root)' from rank 1"
    assert wait.ranks == (0, 1)
    assert states(found)["(root)"] == "gathering"
    assert any(line.startswith(f"  waits in {wait.what} for ") for line in str(found).splitlines())


def test_asking_all_the_time_changes_no_bit() -> None:
    results = []
    for asks in (False, True):
        model, optimizer = build(Job(zero=3))
        if asks:
            for module in model.modules():
                module.register_forward_pre_hook(lambda *_, m=model: ss.explain(m) and None)
                module.register_forward_hook(lambda *_, m=model: str(ss.explain(m)) and None)
        for step in range(2):
            run_step(model, optimizer, Job(zero=3), step, 0, 1)
            optimizer.step()
            optimizer.zero_grad()
        results.append([unit.main.clone() for unit in runtime_of(model).units])
    assert all(map(torch.equal, *results))


def test_ranks_are_named_where_they_are_known() -> None:
    assert str(Lasting("a norm", 1.25)) == "a norm for 1.2 s"
    assert str(Lasting("a norm", 1.25, (0, 3))) == "a norm for 1.2 s, of ranks 0, 3"
