"""Fifty runs with one fault each, at random places: every verdict is right, on every rank."""

import random
from typing import Any
from unittest import mock

import torch.distributed as dist

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.training.rerun.tiny import NUM_MICROBATCHES, Training
from sidestream.training.rerun import InjectedFault, Verdict

KINDS = ("transient", "persistent", "bug")
NUM_RUNS, NUM_STEPS, WORLD_SIZE = 50, 3, 2


def drawn(number: int) -> tuple[InjectedFault, bool]:
    """The fault of a run, and whether what it spoils is fatal."""
    draw = random.Random(number)
    kind, rank = KINDS[number % len(KINDS)], draw.randrange(WORLD_SIZE)
    place = {"step": draw.randint(1, NUM_STEPS), "call": draw.randrange(NUM_MICROBATCHES)}
    fault = InjectedFault(kind, rank=rank, hardware=hardware(rank, 0), **place)
    return fault, draw.random() < 0.5


def hardware(rank: int, shift: int) -> str:
    return f"place {(rank + shift) % WORLD_SIZE}"


def verdict_of(
    rank: int, fault: InjectedFault, fatal: bool, *, first_shift: int
) -> tuple[list[int], Verdict | None]:
    """Exit codes of all processes, and the verdict."""
    codes: list[int] = []
    saved: dict[str, Any] | None = None
    while len(codes) < 4:
        # Resumed once on the same places, if it shifts by 0 first, then on each other's.
        shift = 0 if saved is None else first_shift + len(codes) - 1
        training = Training(rank, fatal=fatal, injector=fault, hardware=hardware(rank, shift))
        if saved is not None:
            training.load(saved, with_rng=len(codes) == 1)
        decision = training.train(NUM_STEPS)
        codes.append(decision.code)
        if decision.code != 16:
            break
        saved = training.saved() if decision.checkpoint else saved
    return codes, training.machine.verdict


def shift_of(number: int) -> int:
    """Whether a run is resumed on other hardware at once."""
    return int(number % 5 > 0)


def all_runs(rank: int, world_size: int) -> list[tuple[list[int], Verdict | None]]:
    return [
        verdict_of(rank, *drawn(number), first_shift=shift_of(number)) for number in range(NUM_RUNS)
    ]


def test_fifty_verdicts_are_right() -> None:
    by_rank = run_on_ranks(all_runs, WORLD_SIZE)
    assert by_rank[0] == by_rank[1]
    for number, (codes, verdict) in enumerate(by_rank[0]):
        fault, fatal = drawn(number)
        assert verdict is not None, (number, fault)
        assert (verdict.kind.value, verdict.step) == (fault.kind, fault.step)
        (suspect,) = verdict.suspects
        assert suspect.rank == fault.rank and suspect.rejection.call == fault.call
        assert suspect.hardware == (fault.hardware,)
        if fault.kind == "transient":
            assert codes == [17 if fatal else 0]
        else:
            assert codes == [16] * (2 - shift_of(number)) + [17]


def counted(rank: int, world_size: int) -> list[int]:
    """Collectives of a run whose results are accepted, and of one that runs a step again."""
    counts = []
    for fault in (None, InjectedFault("transient", 2, rank=1)):
        training, calls = Training(rank, fatal=False, injector=fault), []

        def counting(function: Any, calls: list[str] = calls) -> Any:
            def called(*args: Any, **options: Any) -> Any:
                calls.append(function.__name__)
                return function(*args, **options)

            return called

        with (
            mock.patch.object(dist, "all_reduce", counting(dist.all_reduce)),
            mock.patch.object(dist, "all_gather_object", counting(dist.all_gather_object)),
        ):
            training.train(NUM_STEPS)
        counts += [calls.count("all_reduce"), calls.count("all_gather_object")]
    return counts


def test_a_step_that_is_accepted_costs_one_collective() -> None:
    assert run_on_ranks(counted, WORLD_SIZE) == [[NUM_STEPS, 0, NUM_STEPS, 2]] * WORLD_SIZE
