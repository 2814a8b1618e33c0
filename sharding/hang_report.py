"""Who waits for whom, in words, from what ranks have said of themselves. Pure: no rank is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from .accounts import Account, AwaitedCollective
from .messages import listed

_MOST_LINES = 16
_Use = tuple[str, int, int]


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
    names = _names(uses)
    clauses, awaited = [], dict[int, None]()
    for use, standing in uses.items():
        missing = _missing(standing, answers)
        awaited.update(dict.fromkeys(missing))
        whom = {rank: _relative(answers.get(rank), names) for rank in missing}
        clauses.append(_clause(names[use], standing, whom))
    silent = [rank for rank, one in answers.items() if isinstance(one, Silent)]
    clauses += [str(answers[rank]) for rank in silent if rank not in awaited]
    first = listed(clauses, "; ") or "no rank waits in a collective"
    order = [rank for rank in dict.fromkeys([*awaited, *silent, *answers]) if rank in answers]
    lines = [str(answers[rank]) for rank in sorted(order[:_MOST_LINES])]
    if left := len(order[_MOST_LINES:]):
        lines.append(f"and {left} more ranks")
    return "\n  ".join([first, *lines])


def _uses(answers: Mapping[int, Answer]) -> dict[_Use, dict[int, AwaitedCollective]]:
    """The collectives in which ranks stand, and who stands there."""
    found: dict[_Use, dict[int, AwaitedCollective]] = {}
    for rank, one in answers.items():
        for wait in () if isinstance(one, Silent) else one.waits:
            found.setdefault(_use_of(wait), {})[rank] = wait
    return found


def _names(uses: Collection[_Use]) -> dict[_Use, str]:
    """What to call each: with model and number only where ranks stand in several of one name."""
    models = Counter(what for what, _ in {(what, model) for what, model, _ in uses})
    numbers = Counter((what, model) for what, model, _ in uses)
    return {
        (what, model, number): what
        + (f" of model {model}" if models[what] > 1 else "")
        + (f" (use number {number})" if numbers[what, model] > 1 else "")
        for what, model, number in uses
    }


def _use_of(wait: AwaitedCollective) -> _Use:
    return wait.what, wait.model, wait.number


def _missing(standing: Mapping[int, AwaitedCollective], answers: Mapping[int, Answer]) -> list[int]:
    """Those that take part in what others stand in, and do not stand in it."""
    known = {rank for wait in standing.values() for rank in wait.ranks}
    return [rank for rank in sorted(known or answers) if rank not in standing]


def _clause(name: str, standing: Mapping[int, AwaitedCollective], whom: Mapping[int, str]) -> str:
    """Those who stand in one collective, and what those do `whom` they wait for."""
    waited_s = max(wait.lasting_s for wait in standing.values())
    has = "have" if len(standing) > 1 else "has"
    said = f"{_ranks(standing)} {has} waited {waited_s:.1f} s in {name}"
    if not whom:
        return f"{said}, where all its ranks stand: look at the network between them"
    alike: dict[str, list[int]] = {}
    for rank, text in whom.items():
        alike.setdefault(text, []).append(rank)
    named = [f"{_ranks(ranks)}, which {text}" for text, ranks in alike.items()]
    return f"{said} for {listed(named, ' and for ')}"


def _relative(answer: Answer | None, names: Mapping[_Use, str]) -> str:
    """What a rank that others wait for did; goes on "rank 1, which", and "ranks 1, 2, which"."""
    if answer is None:
        return "could not be asked: of another group"
    if isinstance(answer, Silent):
        return answer.why
    if answer.waits:
        return f"stood in {listed([names[_use_of(wait)] for wait in answer.waits])}"
    return f"stood {answer.doing} (at {answer.place})"


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
