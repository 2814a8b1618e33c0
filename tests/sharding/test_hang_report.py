"""Who waits for whom, in words, from accounts that were made up."""

from typing import Any

import pytest

from sidestream.sharding.accounts import Account, AwaitedCollective
from sidestream.sharding.hang_report import Answer, Silent, hang_report


def rank(number: int, *waits: Any, doing: str = "in a backward") -> Account:
    return Account(number, "host", 100 + number, "train.py:88 in main", doing, tuple(waits))


def wait(what: str, lasting_s: float = 96.0, number: int = 7, **more: Any) -> AwaitedCollective:
    return AwaitedCollective(what, number, lasting_s, **more)


def first(*answers: Answer) -> str:
    return hang_report({one.rank: one for one in answers}).splitlines()[0]


X, N = wait("exchange of 'b2'"), wait("a norm", number=-1)
AWAY = "stood in the forward of 'b5' (at train.py:88 in main)"
IN_USER_CODE = {"doing": "in the forward of 'b5'"}
CASES = {
    "one is elsewhere": (
        [rank(0, X), rank(1, X), rank(2, **IN_USER_CODE), rank(3, wait(X.what, 12.25))],
        f"ranks 0, 1, 3 have waited 96.0 s in exchange of 'b2' for rank 2, which {AWAY}",
    ),
    "two are elsewhere, alike": (
        [rank(0, X), rank(1, **IN_USER_CODE), rank(2, **IN_USER_CODE)],
        f"rank 0 has waited 96.0 s in exchange of 'b2' for ranks 1, 2, which {AWAY}",
    ),
    "each in another collective": (
        [rank(0, X), rank(1, N)],
        "rank 0 has waited 96.0 s in exchange of 'b2' for rank 1, which stood in a norm; "
        "rank 1 has waited 96.0 s in a norm for rank 0, which stood in exchange of 'b2'",
    ),
    "same name, another use": (
        [rank(0, X), rank(1, wait(X.what, number=8))],
        "rank 0 has waited 96.0 s in exchange of 'b2' (use number 7) for rank 1, which stood in "
        "exchange of 'b2' (use number 8); rank 1 has waited 96.0 s in exchange of 'b2' (use number "
        "8) for rank 0, which stood in exchange of 'b2' (use number 7)",
    ),
    "same name, same use, another model": (
        [rank(0, wait("a gather", model=0)), rank(1, wait("a gather", model=1))],
        "rank 0 has waited 96.0 s in a gather of model 0 for rank 1, which stood in a gather of "
        "model 1; rank 1 has waited 96.0 s in a gather of model 1 for rank 0, which stood in a "
        "gather of model 0",
    ),
    "silent": (
        [rank(0, X), Silent(1, "has ended (process 7 on host)")],
        "rank 0 has waited 96.0 s in exchange of 'b2' for rank 1, which has ended (process 7 on "
        "host)",
    ),
    "silent, and nobody waits": ([rank(0), Silent(1, "is gone")], "rank 1 is gone"),
    "a part of the ranks": (
        [rank(0, wait("a sum", ranks=(0, 2))), rank(1), rank(2), rank(3)],
        "rank 0 has waited 96.0 s in a sum for rank 2, which stood in a backward (at train.py:88 "
        "in main)",
    ),
    "of a rank that was not asked": (
        [rank(0, wait("a sum", ranks=(0, 9))), rank(1)],
        "rank 0 has waited 96.0 s in a sum for rank 9, which could not be asked: of another group",
    ),
    "all stand in it": (
        [rank(0, X), rank(1, X)],
        "ranks 0, 1 have waited 96.0 s in exchange of 'b2', where all its ranks stand: look at the "
        "network between them",
    ),
    "nobody waits": ([rank(0), rank(1)], "no rank waits in a collective"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name: str) -> None:
    answers, sentence = CASES[name]
    assert first(*answers) == sentence


def test_of_a_thousand_ranks_those_that_matter_are_shown() -> None:
    answers = {number: rank(number, X) for number in range(1000) if number != 700}
    answers[700] = rank(700, **IN_USER_CODE)
    head, *lines = hang_report(answers).splitlines()
    assert head.startswith("ranks 0-699, 701-999 have waited 96.0 s in exchange of 'b2' for rank 7")
    assert lines[-2].startswith("  rank 700: in the forward of 'b5'")
    assert lines[-1] == "  and 984 more ranks"
    assert len(lines) == 17


def test_silent_ranks_of_another_machine_are_named_together() -> None:
    silent = [Silent(number, "never answered: gone") for number in (1, 2, 3)]
    assert first(rank(0, X), *silent) == (
        "rank 0 has waited 96.0 s in exchange of 'b2' for ranks 1-3, which never answered: gone"
    )
