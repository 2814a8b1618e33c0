"""Joules are those of the rank's own GPU, or of the host's packages, each counted once."""

import inspect
import sys
from types import SimpleNamespace
from unittest import mock

import pynvml
import pytest
import torch

from sidestream.training.measures import (
    Energy,
    EnergyMonitor,
    NvmlSource,
    RaplSource,
    energy,
    energy_sources,
    sum_over_ranks,
)
from sidestream.training.measures.energy_sources import EnergyUnavailable, source_of


class FakeNvml:
    """GPUs in the order of the machine, which need not be CUDA's, by UUID; or what fails."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, millijoules, *, mig=(), broken=()):
        self.millijoules, self.mig, self.broken = dict(millijoules), dict(mig), broken
        self.num_users = 0

    def _may(self, act):
        if act in self.broken:
            raise self.NVMLError(f"{act} is not supported")

    def nvmlInit(self):
        self._may("nvmlInit")
        self.num_users += 1

    def nvmlShutdown(self):
        assert self.num_users
        self.num_users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.millijoules and uuid not in self.mig:
            raise self.NVMLError("Not Found")
        return f"handle of {uuid}"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice):
        return f"handle of {self.mig[migDevice.removeprefix('handle of ')]}"

    def nvmlDeviceGetUUID(self, handle):
        return handle.removeprefix("handle of ")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._may("nvmlDeviceGetTotalEnergyConsumption")
        return self.millijoules[handle.removeprefix("handle of ")]


GPUS = {"GPU-aa": 1_000, "GPU-bb": 5_000_000_000_123, "GPU-cc": 3_000}


@pytest.mark.parametrize("name", [name for name in vars(FakeNvml) if name.startswith("nvml")])
def test_nvidias_package_has_these_functions(name):
    theirs = inspect.signature(getattr(pynvml, name)).parameters
    ours = [*inspect.signature(getattr(FakeNvml, name)).parameters][1:]
    assert [*theirs] == ours
    assert issubclass(pynvml.NVMLError, Exception)


def test_the_counter_is_that_of_cudas_uuid(monkeypatch):
    """CUDA_VISIBLE_DEVICES=2,1 makes the machine's GPU 2 CUDA's 0."""
    nvml = FakeNvml(GPUS)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    visible = [SimpleNamespace(uuid="cc"), SimpleNamespace(uuid="bb")]
    with mock.patch.object(
        torch.cuda, "get_device_properties", lambda device: visible[device.index]
    ):
        sources = [
            source_of(torch.device("cuda", index), local_rank=index, host_name="a")
            for index in (0, 1)
        ]
    for source, key, joules in zip(sources, ("GPU-cc", "GPU-bb"), (3.0, 5e9 + 0.123), strict=True):
        source.open()
        assert (source.key, source.read_joules(), source.remark) == (key, joules, "")
        source.close()
    assert nvml.num_users == 0


def test_a_mig_instance_has_the_joules_of_its_gpu():
    nvml = FakeNvml(GPUS, mig={"MIG-11": "GPU-bb", "MIG-22": "GPU-bb"})
    for uuid in ("11", "MIG-22"):
        source = NvmlSource(uuid, nvml)
        source.open()
        assert (source.key, source.read_joules()) == ("GPU-bb", 5e9 + 0.123)
        assert "MIG instance" in source.remark


BROKEN = {
    "no driver": (("nvmlInit",), "aa", "NVML does not start: nvmlInit is not supported"),
    "an old GPU": (
        ("nvmlDeviceGetTotalEnergyConsumption",),
        "aa",
        "GPU aa: no counter of energy: nvmlDeviceGetTotalEnergyConsumption is not supported",
    ),
    "a GPU that is not there": ((), "zz", "GPU zz: Not Found"),
}


@pytest.mark.parametrize(("broken", "uuid", "text"), BROKEN.values(), ids=BROKEN)
def test_why_a_gpu_tells_nothing(broken, uuid, text):
    nvml = FakeNvml(GPUS, broken=broken)
    monitor = EnergyMonitor(source=NvmlSource(uuid, nvml))
    monitor.setup()
    assert str(monitor.lap()) == f"unavailable: {text}"
    monitor.shutdown()
    assert nvml.num_users == 0


def test_where_nvidias_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnergyUnavailable, match=r"pip install 'sidestream\[energy\]'"):
        NvmlSource("aa").open()


@pytest.fixture
def powercap(tmp_path):
    """Two packages with zones inside, psys around them, and the second way to the first package;
    kilojoules that begin anew after 1000 and 500.
    """

    def zone(name, text, energy_kj, end_kj=1000):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "name").write_text(f"{text}\n")
        (folder / "energy_uj").write_text(f"{energy_kj * 10**9}\n")
        (folder / "max_energy_range_uj").write_text(f"{end_kj * 10**9 - 1}\n")

    zone("intel-rapl:0", "package-0", 900)
    zone("intel-rapl:0:0", "core", 70)
    zone("intel-rapl:0:1", "package-fake", 70)
    zone("intel-rapl:1", "package-1", 100, end_kj=500)
    zone("intel-rapl:2", "psys", 5000)
    zone("intel-rapl-mmio:0", "package-0", 900)
    return tmp_path


def put(powercap, **values):
    for name, value in values.items():
        zone, _, file = name.partition("__")
        (powercap / f"intel-rapl:{zone[1:]}" / file).write_text(f"{value}\n")


def count(powercap, **kilojoules):
    put(powercap, **{f"{zone}__energy_uj": each * 10**9 for zone, each in kilojoules.items()})


def test_packages_are_summed_and_begin_anew(powercap):
    monitor = EnergyMonitor(source=RaplSource("a", powercap))
    monitor.setup()
    count(powercap, z0=950, z1=120, z2=9000)
    assert monitor.lap().joules == 70e3
    count(powercap, z0=9, z1=20)
    # 50 up to 1000 and 9 from there; 380 up to 500 and 20.
    assert monitor.lap().joules == 59e3 + 400e3
    assert monitor.get_total() == Energy(529e3, "CPU packages of a", "")


def test_its_range_tells_how_often_to_read(powercap):
    put(powercap, z0__max_energy_range_uj=262143328850, z1__max_energy_range_uj=65532610987)
    source = RaplSource("a", powercap)
    source.open()
    assert source.max_gap_s == pytest.approx(65.5, abs=0.1)


def no_packages(powercap):
    for zone in (0, 1):
        (powercap / f"intel-rapl:{zone}" / "name").write_text("dram\n")


UNREADABLE = {
    "no package": (no_packages, "no package counts energy in .*/intel-rapl:"),
    "no number": (
        lambda root: put(root, z1__energy_uj="off"),
        "expected a whole number in .*'off'",
    ),
    "no file": (
        lambda root: (root / "intel-rapl:1/energy_uj").unlink(),
        "energy_uj cannot be read",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), UNREADABLE.values(), ids=UNREADABLE)
def test_why_a_cpu_tells_nothing(powercap, spoil, text):
    spoil(powercap)
    with pytest.raises(EnergyUnavailable, match=text):
        RaplSource("a", powercap).open()


def test_what_only_root_may_read(powercap):
    original = energy_sources.Path.read_text

    def read_text(path, **options):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return original(path, **options)

    with (
        mock.patch.object(energy_sources.Path, "read_text", read_text),
        pytest.raises(EnergyUnavailable, match=r"may not be read by this user; .* chmod a\+r"),
    ):
        RaplSource("a", powercap).open()


def test_one_rank_of_a_host_counts_its_packages(powercap, monkeypatch):
    monkeypatch.setattr(energy_sources, "RaplSource", lambda host: RaplSource(host, powercap))
    used = []
    for host_name, local_rank in (("a", 0), ("a", 1), ("b", 0)):
        monkeypatch.setattr("platform.node", lambda name=host_name: name)
        monitor = EnergyMonitor(local_rank=local_rank)
        count(powercap, z0=0)
        monitor.setup()
        count(powercap, z0=500)
        used.append(monitor.lap())
    assert [each.joules for each in used] == [5e5, 0.0, 5e5]
    assert used[1].remark == "CPU packages of a: counted by its local rank 0"
    with mock.patch.object(energy, "gathered", return_value=used):
        assert sum_over_ranks(used[0]).joules == 1e6
