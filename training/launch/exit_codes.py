"""Exit codes that all ranks of a run agree on: they end well, and say what is to be done next."""

RESUME_TO_DISAMBIGUATE = 16
"""Resume from the checkpoint on other hardware: a rejected result was reproduced on the same."""
FAILED_ON_RESULT_VALIDATION = 17
"""A result was rejected, and what it was due to is known: look at the verdict."""
AGREED = frozenset({0, RESUME_TO_DISAMBIGUATE, FAILED_ON_RESULT_VALIDATION})
