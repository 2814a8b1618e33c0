"""What a run hands back: the RESULT line, its figures and the fingerprint of the trained
parameters.
"""

import ctypes
import hashlib
import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .data import MIB

RESULT_PREFIX = "RESULT "


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Figures of one run.

    Losses are means over the ranks in nats per byte; `loss_first` is that of step 1, also in a
    resumed run. Times cover the steps of this process: `tokens_per_s` is the median of each step's
    tokens over its time. `peak_mib` is the largest of the ranks': memory allocated on the GPU,
    else resident memory. `reserved_mib`, on a GPU, is what the allocator took for it: memory that
    one stream has freed is not another's. Joules are those of all ranks in their steps; None: not
    asked for, or not known.
    """

    loss_first: float
    loss_last: float
    loss_held_out: float
    tokens_per_s: float
    step_ms_median: float
    peak_mib: float
    reserved_mib: float | None
    params_sha256: str
    world: int
    zero: int
    seed: int
    steps: int
    first_step: int
    compute: str
    grad_wire: str
    param_wire: str | None
    model: str
    num_parameters: int
    device: str
    wire_bytes_per_step: int | None
    torch: str
    triton: str
    use_torch_fsdp2: bool = False
    joules_per_step: float | None = None
    joules_per_token: float | None = None

    def line(self) -> str:
        """The last line of a run's standard output."""
        return RESULT_PREFIX + json.dumps(asdict(self))

    def write(self, path: str) -> None:
        """Write the figures as a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the tensors' FP32 values as little-endian bytes, in the order of their
    names.
    """
    assert sys.byteorder == "little", "byte order of the fingerprint"
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", torch.float32).contiguous()
        if tensor.numel():
            # Not tensor.numpy(): NumPy is not one of our requirements.
            digest.update((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
    return digest.hexdigest()


def reserved_memory_mib(device: torch.device) -> float | None:
    """Return the most memory that torch's allocator had reserved on the GPU; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) / MIB if device.type == "cuda" else None


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory that this process held: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss on Linux: a started process inherits it from the one that started it.
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024
