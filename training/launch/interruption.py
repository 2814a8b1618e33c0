"""SIGINT and SIGTERM: noted while a launcher watches, raised in a run of one rank, at once the end
of a rank among others.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")


class NotedSignals:
    """Notes the first signal that asks to end, for whoever polls: no cleaning up is cut short."""

    def __init__(self) -> None:
        self._noted: int | None = None

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """Be the handler of a signal."""
        self._noted = self._noted or signal_number

    def raise_noted(self) -> None:
        """Raise what was noted.

        Raises:
            Interrupted: a signal came.
        """
        if self._noted is not None:
            raise Interrupted(self._noted)


@contextmanager
def noting_signals() -> Iterator[NotedSignals]:
    """Note SIGINT and SIGTERM inside the block."""
    noted = NotedSignals()
    with _handled_by(noted.note):
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


def end_on_signals() -> None:
    """Have SIGINT and SIGTERM end this process wherever it stands, waiting for other ranks too."""
    for number in ENDING_SIGNALS:
        # As nohup does, whoever started us may want one ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _handled_by(handler: "signal._HANDLER") -> Iterator[None]:
    # In another thread there are no signals; and whoever started us with one ignored wants that.
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in ENDING_SIGNALS if is_main}
    taken = [number for number, before in previous.items() if before not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, previous[number])
