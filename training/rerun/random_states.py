"""The states of all generators of random numbers that a step may draw from."""

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomStates:
    """Of Python, NumPy if it is loaded, PyTorch on the CPU, and on each GPU (none before CUDA is
    used). `device`: the number of the GPU that was current.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    gpus: tuple[Tensor, ...]
    device: int

    @classmethod
    def now(cls) -> "RandomStates":
        """As they are; waits for no device."""
        numpy = sys.modules.get("numpy")
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if uses_cuda else (),
            torch.cuda.current_device() if uses_cuda else 0,
        )

    def restore(self) -> None:
        """Have all generators stand there."""
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for number, state in enumerate(self.gpus):
            torch.cuda.set_rng_state(state, number)

    def plain(self) -> tuple[Any, ...]:
        """For a checkpoint: of GPUs, the current one's alone, which may be another one later."""
        numpy = None if self.numpy is None else (*self.numpy[:1], *_as_integers(self.numpy[1:]))
        return self.python, numpy, self.cpu, self.gpus[self.device] if self.gpus else None

    @staticmethod
    def restore_plain(states: tuple[Any, ...]) -> None:
        """Have the generators stand where `plain` says."""
        python, numpy, cpu, gpu = states
        device = torch.cuda.current_device() if gpu is not None else 0
        now = RandomStates.now()
        gpus = list(now.gpus)
        if gpu is not None and gpus:
            gpus[device] = gpu
        RandomStates(python, numpy, cpu, tuple(gpus), device).restore()


def _as_integers(parts: Any) -> tuple[Any, ...]:
    keys, *more = parts
    return tuple(int(key) for key in keys), *more
