"""What makes a step cheaper for the host: fused functions (`jit_fuser`), and whole steps as CUDA
graphs (`FullStepGraph`).
"""

from .full_step_graph import FullStepGraph
from .jit import (
    disable_jit_fuser,
    enable_jit_fuser,
    jit_fuser,
    jit_fuser_disabled,
    noop_decorator,
)
from .recording import CaptureError

__all__ = [
    "CaptureError",
    "FullStepGraph",
    "disable_jit_fuser",
    "enable_jit_fuser",
    "jit_fuser",
    "jit_fuser_disabled",
    "noop_decorator",
]
