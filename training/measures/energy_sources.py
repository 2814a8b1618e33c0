"""Counters of joules: that of a GPU, by NVML, and those of a host's CPU packages, by RAPL.

    NvmlSource   `nvmlDeviceGetTotalEnergyConsumption`, millijoules since the driver was loaded; of
                 a MIG instance, that of its whole GPU
    RaplSource   /sys/class/powercap/intel-rapl:N/energy_uj, microjoules that begin anew at
                 max_energy_range_uj; the zones called package-N are summed. Zones inside them
                 (intel-rapl:N:M) are parts of a package, and psys has all packages in it. Memory
                 that a package does not count is left out

Several ranks can have the same counter: they share its `key`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

POWERCAP = Path("/sys/class/powercap")


class EnergyUnavailable(Exception):
    """There is nothing to read; the text says why."""


class EnergySource(Protocol):
    """A counter of joules. `key`: which one, the same in every rank that reads it; `remark`: what
    must be known about its joules, if anything; `max_gap_s`: the difference of two readings that
    are farther apart can be wrong. All are final once it is open.
    """

    key: str
    remark: str
    max_gap_s: float

    def open(self) -> None:
        """Find it. Raises `EnergyUnavailable`."""

    def read_joules(self) -> float:
        """What it has counted by now, from any beginning. Raises `EnergyUnavailable`."""

    def close(self) -> None:
        """Leave it."""


class NvmlSource:
    """The counter of the GPU with CUDA's `uuid`, which no CUDA_VISIBLE_DEVICES and no order of
    devices changes. nvml: a module with NVML's functions; None: nvidia-ml-py's, imported by `open`.
    """

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.key = self._uuid = uuid
        self.remark, self.max_gap_s = "", math.inf
        self._nvml = nvml
        self._handle: Any = None

    def open(self) -> None:
        """Find the GPU."""
        if self._nvml is None:
            try:
                import pynvml
            except ImportError as error:
                raise EnergyUnavailable(
                    "nvidia-ml-py is not installed; pip install 'sidestream[energy]'"
                ) from error
            self._nvml = pynvml
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise EnergyUnavailable(f"NVML does not start: {error}") from error
        try:
            handle = self._find()
            if nvml.nvmlDeviceIsMigDeviceHandle(handle):
                # An instance has no counter of its own.
                handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                self.remark = "of the whole GPU, of which the rank has a MIG instance"
            self._handle, self.key = handle, nvml.nvmlDeviceGetUUID(handle)
            self.read_joules()
        except (nvml.NVMLError, EnergyUnavailable) as error:
            nvml.nvmlShutdown()
            raise EnergyUnavailable(f"GPU {self._uuid}: {error}") from error

    def read_joules(self) -> float:
        """Since the driver was loaded."""
        try:
            millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError as error:
            raise EnergyUnavailable(
                f"GPU {self._uuid} has no counter of energy: {error}"
            ) from error
        return float(millijoules) / 1e3

    def close(self) -> None:
        """Leave NVML."""
        self._nvml.nvmlShutdown()

    def _find(self) -> Any:
        # CUDA says neither which of the two kinds a device is, nor the beginning of its UUID.
        names = (
            [self._uuid]
            if self._uuid.startswith(("GPU-", "MIG-"))
            else [f"GPU-{self._uuid}", f"MIG-{self._uuid}"]
        )
        failed: list[Exception] = []
        for name in names:
            try:
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
            except self._nvml.NVMLError as error:
                failed.append(error)
        raise failed[0]


@dataclass(slots=True)
class _Package:
    """A package's zone: how far it counts, and what it said last, in microjoules."""

    zone: Path
    range_uj: int
    last_uj: int


class RaplSource:
    """The packages of the host called `host_name`, below `root`."""

    def __init__(self, host_name: str, root: Path = POWERCAP) -> None:
        self.key = f"CPU packages of {host_name}"
        self.remark, self.max_gap_s = "", math.inf
        self._root = root
        self._packages: list[_Package] = []
        self._counted_uj = 0

    def open(self) -> None:
        """Find the packages."""
        zones = sorted(zone for zone in self._root.glob("intel-rapl:*") if _is_package(zone))
        if not zones:
            raise EnergyUnavailable(f"no package counts energy in {self._root}/intel-rapl:*")
        self._packages = [
            _Package(zone, _number(zone / "max_energy_range_uj"), _number(zone / "energy_uj"))
            for zone in zones
        ]
        self.max_gap_s = min(_full_s(package) for package in self._packages)

    def read_joules(self) -> float:
        """Since `open`, if no package began anew twice between two readings."""
        for package in self._packages:
            now_uj = _number(package.zone / "energy_uj")
            # It counts up to and with max_energy_range_uj, then 0 follows.
            self._counted_uj += (now_uj - package.last_uj) % (package.range_uj + 1)
            package.last_uj = now_uj
        return self._counted_uj / 1e6

    def close(self) -> None:
        """Nothing to leave."""


class CountedElsewhere:
    """Of a rank whose host's packages another rank counts: none of them are its own."""

    def __init__(self, host_name: str) -> None:
        self.key = f"CPU packages of {host_name}"
        self.remark, self.max_gap_s = f"{self.key}: counted by its local rank 0", math.inf

    def open(self) -> None:
        """Nothing to find."""

    def read_joules(self) -> float:
        """None of its own."""
        return 0.0

    def close(self) -> None:
        """Nothing to leave."""


def source_of(device: torch.device, *, local_rank: int, host_name: str) -> EnergySource:
    """The counter of a rank: that of its GPU, or on a CPU that of its host, which the first rank
    there has.
    """
    if device.type == "cuda":
        return NvmlSource(str(torch.cuda.get_device_properties(device).uuid))
    return CountedElsewhere(host_name) if local_rank else RaplSource(host_name)


def _is_package(zone: Path) -> bool:
    is_inside = zone.name.count(":") > 1
    return not is_inside and _text(zone / "name").startswith("package")


def _full_s(package: _Package) -> float:
    """In how many seconds the power limit of a package counts to its end, infinite where there is
    no limit.
    """
    limit = package.zone / "constraint_0_power_limit_uw"
    limit_uw = _number(limit) if limit.exists() else 0
    return package.range_uj / limit_uw if limit_uw else math.inf


def _number(path: Path) -> int:
    text = _text(path)
    try:
        return int(text)
    except ValueError as error:
        raise EnergyUnavailable(f"expected a whole number in {path}, got {text!r}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except PermissionError as error:
        raise EnergyUnavailable(
            f"{path} may not be read by this user; let an administrator run: chmod a+r {path}"
        ) from error
    except OSError as error:
        raise EnergyUnavailable(f"{path} cannot be read: {error.strerror}") from error
