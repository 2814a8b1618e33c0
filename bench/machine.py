"""What a result says of where it was measured: device, threads, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
_CPU_INFO = Path("/proc/cpuinfo")


def describe(device: torch.device) -> dict[str, str | int | None]:
    """`device` names the hardware; `threads`, of a CPU's kernels, is None on a GPU."""
    import triton

    found: dict[str, str | int | None] = {
        "device": _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["threads"] = None
        found["cuda"] = torch.version.cuda
        query = ("nvidia-smi", "--query-gpu=driver_version,clocks.max.mem", "--format=csv,noheader")
        found["driver, memory clock"] = _output(*query)
    return found


def _cpu_name() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
