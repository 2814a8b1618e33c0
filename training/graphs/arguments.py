"""What a `FullStepGraph` is made with: checks, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...sharding import is_sharded
from ...sharding.capture import StepRecorder
from .plain_gradients import PlainRecorder
from .recording import Recorder


def require_step(step: object) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(step):
        raise TypeError(f"step: expected a function, got {type(step).__name__}; pass the function")


def require_modules(modules: object) -> None:
    """Refuse what is no list of models.

    Raises:
        TypeError: it is something else.
    """
    is_list = isinstance(modules, (list, tuple))
    if not is_list or not all(isinstance(one, nn.Module) for one in modules):  # type: ignore[attr-defined]
        raise TypeError(
            "modules: expected a list of all models that the step trains, got "
            f"{type(modules).__name__}; pass [model]"
        )


def require_generators(generators: Sequence[object], device: torch.device) -> None:
    """Refuse what gives no random numbers on `device`.

    Raises:
        TypeError: it gives none at all.
        ValueError: it gives them elsewhere.
    """
    for generator in generators:
        if not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generators: expected torch.Generator objects, got {type(generator).__name__}"
            )
        if numbered(generator.device) != device:
            raise ValueError(
                f"generators: expected some of {device}, where the step runs, got one of "
                f"{generator.device}; make it with torch.Generator('{device}')"
            )


def recorder_of(module: nn.Module) -> Recorder:
    """What records steps of `module`, sharded or not.

    Raises:
        ValueError: it is sharded, but not the one passed to `fully_shard`.
    """
    return StepRecorder(module) if is_sharded(module) else PlainRecorder(module)


def device_of(modules: Sequence[nn.Module]) -> torch.device:
    """That of the first parameter; without any, the GPU if there is one."""
    params = (param for module in modules for param in module.parameters())
    first = next(params, None)
    if first is not None:
        return first.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbered(device: torch.device) -> torch.device:
    """`device` with its number, if it is a GPU."""
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", torch.cuda.current_device())
