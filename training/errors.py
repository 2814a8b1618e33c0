"""The errors of a run; those of usage are one line on the command line, without a traceback."""


class UsageError(ValueError):
    """The caller asked for something that cannot be done; the text says what was expected, what
    came and the fix.
    """


class OptionsError(UsageError):
    """An option, or two of them together, cannot be used."""


class DataError(UsageError):
    """The training text cannot be read, or there is too little of it."""


class CheckpointError(UsageError):
    """There is no checkpoint to resume from, or it belongs to another run."""


class NonFiniteRunError(ArithmeticError):
    """A loss or a gradient norm is NaN or infinite, so the run is not saved."""


class RunStopped(Exception):
    """SIGTERM had the run end early, which is no failure: the last step that it made is saved."""
