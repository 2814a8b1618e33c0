"""What a rank computes on, as a name that other ranks and later processes compare."""

import os
import socket
from collections.abc import Mapping

import torch

from ..launch.relaunching import rotation_from


def hardware_name(environ: Mapping[str, str] = os.environ) -> str:
    """The host's name with the UUID of the current GPU, which no order of devices changes, or
    before CUDA is used with "cpu" and the local rank, or the place that our launcher gave it.
    """
    return f"{socket.gethostname()} {_device_name(environ)}"


def _device_name(environ: Mapping[str, str]) -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    rank, rotation = int(environ.get("LOCAL_RANK", "0")), rotation_from(environ)
    return f"cpu {rank if rotation is None else rotation.place_of(rank)}"
