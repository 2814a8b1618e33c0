"""What a rank computes on, as a name that other ranks and later processes compare."""

import os
import socket

import torch

HARDWARE_VARIABLE = "SIDESTREAM_HARDWARE"
"""In the environment: a name in place of the default one."""


def hardware_name() -> str:
    """The host's name with the UUID of the current GPU, which no order of devices changes, or with
    "cpu" and the local rank. `HARDWARE_VARIABLE` says another one after the host's name.
    """
    name = os.environ.get(HARDWARE_VARIABLE)
    if name is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"{socket.gethostname()} {name or 'cpu ' + os.environ.get('LOCAL_RANK', '0')}"
