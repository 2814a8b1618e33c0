"""SIGUSR1 asks a rank what it is doing, and a thread answers on standard error.

A handler in Python would wait until the main thread is back from the collective that it hangs in.
The C handler writes to a pipe at once, from which the thread reads.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .remarks import say

_READ_BYTES = 64


@contextmanager
def answering(answer: Callable[[], str]) -> Iterator[None]:
    """Inside, say `answer()`, called in another thread, whenever SIGUSR1 comes.

    Leaves the signal alone outside of the main thread, and where Python handles it already.
    """
    before = signal.getsignal(signal.SIGUSR1)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before not in (signal.SIG_DFL, signal.SIG_IGN):
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        # The pipe gets the number of every signal that Python handles.
        while numbers := os.read(reader, _READ_BYTES):
            if signal.SIGUSR1 in numbers:
                say(answer())

    thread = threading.Thread(target=listen, name="asked", daemon=True)
    thread.start()
    descriptor_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, False)  # no system call of a backend is cut short
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(descriptor_before)
        os.close(writer)
        thread.join()
        os.close(reader)
