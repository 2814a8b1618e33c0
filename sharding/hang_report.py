"""Who waits for whom, in words, from what ranks have said of themselves. Pure: no rank is asked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from .accounts import Account, AwaitedCollective
from .messages import listed

_MOST_LINES = 16
_Use = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank that did not answer; `why` goes on "rank 1 ..."."""

    rank: int
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


Answer = Account | Silent


def hang_report(answers: Mapping[int, Answer]) -> str:
    """One line that says who waits for whom, then a line a rank: of many, those that are waited for
    come first. `answers`: by global rank.
    """
    uses = _uses(answers)
    clauses, awaited = [], dict[int, None]()
    for use, standing in uses.items():
        missing = _missing(use, standing, answers)
        awaited.update(dict.fromkeys(missing))
        clauses.append(_clause(use, standing, missing, uses, answers))
    silent = [rank for rank, one in answers.items() if isinstance(one, Silent)]
    rest = [rank for rank in silent if rank not in awaited]
    clauses += [str(answers[rank]) for rank in rest]
    first = listed(clauses, "; ") or "no rank waits in a collective"
    order = [*awaited, *rest, *(rank for rank in answers if rank not in {*awaited, *rest})]
    shown = order[:_MOST_LINES]
    lines = [str(answers[rank]) for rank in sorted(shown) if rank in answers]
    if left := len(order) - len(shown):
        lines.append(f"and {left} more ranks")
    return "\n  ".join([first, *lines])


def _uses(answers: Mapping[int, Answer]) -> dict[_Use, dict[int, AwaitedCollective]]:
    """The collectives in which ranks stand, and who stands there."""
    found: dict[_Use, dict[int, AwaitedCollective]] = {}
    for rank, one in answers.items():
        for wait in () if isinstance(one, Silent) else one.waits:
            found.setdefault((wait.what, wait.number), {})[rank] = wait
    return found


def _missing(
    use: _Use, standing: Mapping[int, AwaitedCollective], answers: Mapping[int, Answer]
) -> list[int]:
    """Those that take part in `use` and do not stand in it."""
    known = {rank for wait in standing.values() for rank in wait.ranks}
    return [rank for rank in sorted(known or answers) if rank not in standing]


def _clause(
    use: _Use,
    standing: Mapping[int, AwaitedCollective],
    missing: Collection[int],
    uses: Collection[_Use],
    answers: Mapping[int, Answer],
) -> str:
    what, number = use
    if sum(what == other for other, _ in uses) > 1:
        what = f"{what} (use number {number})"
    waited_s = max(wait.lasting_s for wait in standing.values())
    has = "have" if len(standing) > 1 else "has"
    said = f"{_ranks(standing)} {has} waited {waited_s:.1f} s in {what}"
    if not missing:
        return f"{said}, where all its ranks stand: look at the network between them"
    by_text: dict[str, list[int]] = {}
    for rank in missing:
        by_text.setdefault(_relative(answers.get(rank)), []).append(rank)
    whom = [f"{_ranks(them)}, which {text}" for text, them in by_text.items()]
    return f"{said} for {listed(whom, ' and for ')}"


def _relative(answer: Answer | None) -> str:
    """What a rank that others wait for is doing; goes on "rank 1, which"."""
    if answer is None:
        return "was not asked, since it is of another group"
    if isinstance(answer, Silent):
        return answer.why
    if answer.waits:
        return f"waits in {listed([wait.what for wait in answer.waits])}"
    return f"is {answer.doing} (at {answer.place})"


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", or "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ordered), key=lambda placed: placed[1] - placed[0])
    ]
    texts = [
        str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}"  # noqa: PLR2004
        for run in runs
    ]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {listed(texts)}"
