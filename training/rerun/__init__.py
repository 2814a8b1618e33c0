"""Fault attribution: whether a step's wrong results come from a passing fault of hardware, from
hardware that stays faulty, or from the program.

    from sidestream.training.rerun import RerunDataIterator, RerunStateMachine

`RerunStateMachine` has an example, `transitions.py` what follows from what as a table.
"""

from .data_iterator import RerunDataIterator
from .evidence import Verdict
from .hardware import hardware_name
from .injection import InjectedFault, RerunErrorInjector, fault_here
from .machine import ExitDecision, RejectedResultError, RerunStateMachine
from .quick_stats import QuickStats
from .state import has_open_question
from .transitions import VerdictKind

__all__ = [
    "ExitDecision",
    "InjectedFault",
    "QuickStats",
    "RejectedResultError",
    "RerunDataIterator",
    "RerunErrorInjector",
    "RerunStateMachine",
    "Verdict",
    "VerdictKind",
    "fault_here",
    "hardware_name",
    "has_open_question",
]
