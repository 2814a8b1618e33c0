"""SIGINT and SIGTERM: noted while a launcher watches, raised in a run of one rank, at once the end
of a rank among others; and SIGTERM as a request to end after the step that goes on.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")


class NotedSignals:
    """Notes the signals that ask to end, for whoever polls: no cleaning up is cut short."""

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._is_asked = False

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """Be the handler of a signal."""
        if signal_number == signal.SIGUSR1:
            self._is_asked = True
        else:
            self._noted.append(signal_number)

    def take_question(self) -> bool:
        """Whether SIGUSR1 came, which is then noted no more."""
        is_asked, self._is_asked = self._is_asked, False
        return is_asked

    def take_first(self, signal_number: int) -> bool:
        """Whether the first that was noted is this one, which is then noted no more."""
        is_first = self._noted[:1] == [signal_number]
        if is_first:
            del self._noted[0]
        return is_first

    def raise_noted(self) -> None:
        """Raise the first that was noted.

        Raises:
            Interrupted: a signal came.
        """
        if self._noted:
            raise Interrupted(self._noted[0])


@dataclass(slots=True)
class StopRequest:
    """Whether SIGTERM has asked this process to end after the step that goes on."""

    is_made: bool = False


@contextmanager
def noting_signals() -> Iterator[NotedSignals]:
    """Note SIGINT and SIGTERM inside the block, and SIGUSR1, which asks what goes on."""
    noted = NotedSignals()
    with _handled_by(noted.note, [*ENDING_SIGNALS, signal.SIGUSR1]):
        yield noted


@contextmanager
def raising_signals(*, once: bool = False) -> Iterator[None]:
    """Raise `Interrupted` where the main thread stands when SIGINT or SIGTERM comes.

    once: what comes after the first is passed over, so no cleaning up is cut short.
    """
    is_over = False

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        nonlocal is_over
        if not is_over:
            is_over = once
            raise Interrupted(signal_number)

    with _handled_by(interrupt):
        yield


@contextmanager
def noting_stop(*, among_others: bool) -> Iterator[StopRequest]:
    """Note SIGTERM inside the block, for a loop that looks between its steps.

        with noting_stop(among_others=False) as stop:
            for step in range(first_step, last_step + 1):
                train_step(step)
                if stop.is_made:
                    save(step)
                    break

    A second one is handled as before the block (two that come within one call of C count as one),
    but in a rank `among_others`: whoever started the ranks and whoever told it may both tell them,
    so how often they hear it means nothing.
    """
    request = StopRequest()

    def note(signal_number: int, frame: FrameType | None) -> None:
        request.is_made = True
        if not among_others:
            signal.signal(signal_number, before)

    before = signal.getsignal(signal.SIGTERM)
    with _handled_by(note, [signal.SIGTERM]):
        yield request


def end_on_signals() -> None:
    """Have SIGINT and SIGTERM end this process wherever it stands, waiting for other ranks too."""
    for number in ENDING_SIGNALS:
        # As nohup does, whoever started us may want one ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _handled_by(
    handler: "signal._HANDLER", numbers: Sequence[signal.Signals] = ENDING_SIGNALS
) -> Iterator[None]:
    # In another thread there are no signals; and whoever started us with one ignored wants that.
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in numbers if is_main}
    taken = [number for number, before in previous.items() if before not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, previous[number])
