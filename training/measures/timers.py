"""Named timers of one rank, nested, on the host and on the device.

    timers = Timers(log_level=1)
    with timers.region("step"):
        with timers.region("forward"):           # its path is "step/forward"
            ...
    timers("optimizer", log_level=1).start()     # flat, and by hand
    timers("optimizer").stop()
    print(timers.report())                       # every rank calls it, which gathers once
    timers.write(writer, iteration=10)           # this rank's alone

A start and a stop read the host's clock; on a GPU each also records an event into the current
stream, and nothing waits for it. What is between two events is known once the GPU has come by, so
a report has the occurrences that have passed, and the others are in the next one. `Timer.elapsed`
alone waits, because its caller asked for the time until now.

All times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ...sharding.arguments import require_one_of
from ..across_ranks import gathered
from .clocks import Clock, HostClock, StreamClock
from .timer import AnyTimer, Scope, Timer, UnmeasuredTimer
from .timings import OPTIONS, Reading, Timings
from .writers import TakesScalars

MAX_LOG_LEVEL = 2


class Timers:
    """All timers of a rank, for one thread; the file's first lines show their use.

    log_level: names with a higher one are not measured. log_option: what reports show of the
    ranks' times, one of "max", "minmax", "mean", "all". device: where the work is done; None: the
    current GPU, or the CPU where torch sees none. host_clock, device_clock: in place of the usual
    ones. barrier_group: whom `start(barrier=True)` waits for; None: the whole job.

    Raises:
        ValueError: a log level outside 0 to 2, or an unknown option.
    """

    def __init__(
        self,
        log_level: int = 0,
        log_option: str = "minmax",
        *,
        device: torch.device | str | None = None,
        host_clock: Clock | None = None,
        device_clock: Clock | None = None,
        barrier_group: dist.ProcessGroup | None = None,
    ) -> None:
        _require_level(log_level)
        require_one_of("log_option", log_option, OPTIONS)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device_clock is None and torch.device(device).type == "cuda":
            device_clock = StreamClock()
        self.log_option = log_option
        self._scope = Scope(host_clock or HostClock(), device_clock, log_level, barrier_group)
        self._timers: dict[str, AnyTimer] = {}
        self._outermost: dict[str, AnyTimer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> AnyTimer:
        """The timer of a path, made where there is none; log_level: None stands for that of the
        timer there is, and for the highest, 2, of a new one.

        Raises:
            ValueError: the name is empty, or has another log level.
        """
        timer = self._timers.get(name)
        if timer is None:
            level = MAX_LOG_LEVEL if log_level is None else log_level
            timer = self._timers[name] = self._new(name, level)
        if log_level is not None and log_level != timer.log_level:
            raise _other_level(timer, log_level)
        return timer

    def region(self, name: str, log_level: int = 0) -> AnyTimer:
        """The timer of `name` below the path of the region that is open, for a `with`.

        Raises:
            ValueError: as for a call.
        """
        outer = self._scope.innermost
        inner = self._outermost if outer is None else outer.inner
        timer = inner.get(name)
        if timer is None:
            path = f"{outer.name}/{name}" if outer is not None and name else name
            timer = inner[name] = self(path, log_level)
        elif timer.log_level != log_level:
            raise _other_level(timer, log_level)
        return timer

    def read(self, names: Iterable[str] | None = None, *, reset: bool = True) -> Timings:
        """What this rank's timers know since they were last read; names: of which, None: all.
        reset: the next reading begins after this one.

        Raises:
            RuntimeError: one of them is still running.
            ValueError: one of the names is unknown.
        """
        chosen = None if names is None else tuple(names)
        own = self._readings(chosen)
        return self._timings(own, [own], chosen, reset)

    def gather(
        self,
        group: dist.ProcessGroup | None = None,
        names: Iterable[str] | None = None,
        *,
        reset: bool = True,
    ) -> Timings:
        """What the timers of all ranks of `group` (None: of the job) know; each of them calls this,
        which gathers once. Ranks may have timers of different names.

        Raises:
            RuntimeError: on every rank, a timer of one of them is still running.
            ValueError: on every rank, none of them has one of the names.
            CommunicationError: a rank is gone.
        """
        chosen = None if names is None else tuple(names)
        own: dict[str, Reading | None] = {}
        refusal = ""
        try:
            own = self._readings(chosen)
        except RuntimeError as error:
            refusal = str(error)  # raised on every rank: the others wait for what this one tells
        everyone = gathered((own, refusal), group, "gathering of the timers")
        refused = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
        if refused:
            raise RuntimeError("; ".join(refused))
        return self._timings(own, [told for told, _ in everyone], chosen, reset)

    def report(
        self,
        group: dist.ProcessGroup | None = None,
        names: Iterable[str] | None = None,
        *,
        normalizer: float = 1.0,
        reset: bool = True,
    ) -> str:
        """Lines of times, and of stragglers if there are any; every rank calls it, since it has
        those of `gather`. normalizer: what times are divided by, such as the number of iterations.
        """
        timings = self.gather(group, names, reset=reset)
        return "\n".join([*timings.lines(normalizer), *map(str, timings.stragglers())])

    def write(
        self,
        writer: TakesScalars,
        iteration: int,
        names: Iterable[str] | None = None,
        *,
        normalizer: float = 1.0,
        reset: bool = True,
    ) -> None:
        """Write this rank's times to what has TensorBoard's `add_scalar`; no rank is asked. Those
        of all: `gather().write(writer, iteration)`. Raises as `read` does.
        """
        self.read(names, reset=reset).write(writer, iteration, normalizer)

    def to_json(self, *, reset: bool = False) -> str:
        """This rank's times as `Timings.to_json` has them. Raises as `read` does."""
        return self.read(reset=reset).to_json()

    def _new(self, name: str, log_level: int) -> AnyTimer:
        if not name:
            raise ValueError("name: expected the name of a timer, got an empty one; pass a text")
        _require_level(log_level)
        kind = Timer if log_level <= self._scope.log_level else UnmeasuredTimer
        return kind(name, log_level, self._scope)

    def _measured(self) -> dict[str, Timer]:
        return {name: each for name, each in self._timers.items() if isinstance(each, Timer)}

    def _readings(self, names: Sequence[str] | None) -> dict[str, Reading | None]:
        """Of the names that this rank knows; None where there is nothing to tell."""
        timers = self._measured()
        known = self._timers if names is None else [name for name in names if name in self._timers]
        return {name: timers[name].reading() if name in timers else None for name in known}

    def _timings(
        self,
        own: Iterable[str],
        ranks: Sequence[dict[str, Reading | None]],
        names: Sequence[str] | None,
        reset: bool,
    ) -> Timings:
        """The readings of all ranks, if they have what was asked for; `own` timers begin anew."""
        if unknown := sorted(set(names or ()).difference(*ranks)):
            raise ValueError(
                f"names: expected timers that there are, such as {', '.join(sorted(self._timers))},"
                f" got {', '.join(unknown)}; leave them out"
            )
        if reset:
            timers = self._measured()
            for name in timers.keys() & own:
                timers[name].forget()
        return Timings(
            tuple({name: each for name, each in rank.items() if each} for rank in ranks),
            self.log_option,
        )


def _require_level(log_level: int) -> None:
    if log_level not in range(MAX_LOG_LEVEL + 1):
        raise ValueError(
            f"log_level: expected 0 to {MAX_LOG_LEVEL}, got {log_level!r}; pass 0 for what is "
            "always measured"
        )


def _other_level(timer: AnyTimer, log_level: int) -> ValueError:
    return ValueError(
        f"timer '{timer.name}': expected log level {timer.log_level}, with which it was made, got "
        f"{log_level}; pass the same one everywhere"
    )
