"""A host and a device that are told what time it is."""

from dataclasses import dataclass


@dataclass(eq=False)
class Mark:
    at_s: float
    is_released: bool = False


class FakeHost:
    """Nanoseconds that pass when `run` says so."""

    def __init__(self):
        self.now_ns = 0

    def run(self, seconds):
        self.now_ns += round(seconds * 1e9)

    def mark(self):
        return self.now_ns

    def seconds(self, first, last):
        return (last - first) / 1e9

    def has_passed(self, mark):
        return True

    def wait(self, mark):
        pass

    def on_host(self, value):
        return value


class FakeDevice:
    """A queue of work by its seconds: `enqueue` returns at once, `finish` does it."""

    def __init__(self):
        self.enqueued_s = self.done_s = 0.0
        self.is_capturing = False
        self.waits = self.queries = 0
        self.num_marks = 0  # that were not released
        self.spare = []

    def enqueue(self, seconds):
        self.enqueued_s += seconds

    def finish(self, until_s=None):
        self.done_s = self.enqueued_s if until_s is None else until_s

    def mark(self):
        if self.is_capturing:
            return None
        self.num_marks += 1
        return Mark(self.enqueued_s)

    def has_passed(self, mark):
        assert not self.is_capturing, "CUDA ends a capture when an event is asked for"
        assert not mark.is_released
        self.queries += 1
        return mark.at_s <= self.done_s

    def wait(self, mark):
        self.waits += not self.has_passed(mark)
        self.done_s = max(self.done_s, mark.at_s)

    def seconds(self, first, last):
        assert self.has_passed(last), "an event that has not come has no time"
        return last.at_s - first.at_s

    def release(self, mark):
        assert not mark.is_released
        mark.is_released = True
        self.num_marks -= 1
