"""The errors that the command line shows as one line, without a traceback."""


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
