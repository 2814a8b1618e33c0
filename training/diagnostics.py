"""Looks at this machine, changing nothing: one `Check` for each thing that decides how training
will run.
"""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch
import torch.distributed as dist

from .errors import OptionsError
from .launch.launcher import num_cores
from .launch.ranks import choose_device, default_num_ranks

Status = Literal["ok", "info", "warning", "error"]

GIB = 1 << 30
# Releases that this version supports, as (first, last) of major.minor.
SUPPORTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 9))}
MIN_PYTHON = (3, 11)
MIN_SHARED_MEMORY_BYTES = GIB // 4
LOW_MEMORY_BYTES = 2 * GIB
TRITON_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it stands, what was found, and the fix where one is
    needed.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def collect(environ: Mapping[str, str] = os.environ) -> tuple[Check, ...]:
    """Return all checks of this machine and of `environ`."""
    return (
        check_python(sys.version_info[:2], platform.python_version()),
        check_release("torch", _installed("torch")),
        check_release("triton", _installed("triton")),
        check_pair(_installed("triton"), _triton_that_torch_wants()),
        _system(),
        _cores(environ),
        _memory(),
        _shared_memory(),
        *_gpus(),
        _gloo(),
        _nccl(),
        _loopback(),
        check_connections(environ, has_cuda=torch.cuda.is_available()),
        check_interpreter(environ),
        _device_used(),
        check_kernels(environ),
    )


def check_python(found: tuple[int, ...], text: str) -> Check:
    """Check the interpreter against the oldest one supported."""
    if found < MIN_PYTHON:
        return Check("Python", "error", text, "use Python 3.11 or later")
    return Check("Python", "ok", text)


def check_release(package: str, found: str | None) -> Check:
    """Check an installed release against the supported range."""
    first, last = SUPPORTED[package]
    span = f"{_dotted(first)} to {_dotted(last)}"
    if found is None:
        # On a CPU nothing of ours imports triton.
        status: Status = "error" if package == "torch" or torch.cuda.is_available() else "warning"
        return Check(package, status, "not installed", f"pip install {package}; supported: {span}")
    release = _major_minor(found)
    if release < first:
        return Check(package, "error", found, f"upgrade {package}; supported: {span}")
    if release > last:
        return Check(
            package,
            "warning",
            f"{found}, newer than supported ({span})",
            f"run the tests, or pin {package}",
        )
    return Check(package, "ok", f"{found} (supported: {span})")


def check_pair(triton: str | None, wanted: str | None) -> Check:
    """Check the installed triton against the one that the installed torch was built with; CPU
    builds name none.
    """
    name = "torch/triton pair"
    if wanted is None:
        return Check(name, "ok", "this torch asks for no triton of its own")
    if triton is None or _major_minor(triton) != _major_minor(wanted):
        return Check(
            name,
            "warning",
            f"torch was built with triton {wanted}, got {triton}",
            f"pip install triton=={wanted}",
        )
    return Check(name, "ok", f"torch was built with triton {wanted}")


def check_connections(environ: Mapping[str, str], *, has_cuda: bool) -> Check:
    """Check that kernels of several streams may run at once."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = environ.get(name)
    if value == "1":
        found = "1: it serialises compute and communication"
        return Check(
            name, "warning", found if has_cuda else f"{found} (no GPU here)", f"unset {name}"
        )
    return Check(name, "ok", "not set" if value is None else value)


def check_interpreter(environ: Mapping[str, str]) -> Check:
    """Check that kernels are compiled, not interpreted."""
    name = "TRITON_INTERPRET"
    value = environ.get(name)
    if value not in (None, "", "0"):
        return Check(
            name,
            "warning",
            f"{value}: kernels are interpreted, thousands of times slower",
            f"unset {name}",
        )
    return Check(name, "ok", "not set" if value is None else value)


def check_kernels(environ: Mapping[str, str]) -> Check:
    """Say which implementation of the kernels tensors of the chosen device will meet."""
    name = "kernels used"
    if not torch.cuda.is_available():
        return Check(name, "info", "reference (plain PyTorch), because tensors are on the CPU")
    capability = torch.cuda.get_device_capability(0)
    if torch.version.hip is None and capability < TRITON_CAPABILITY:
        found = f"Triton on sm_{capability[0]}{capability[1]}, older than tested (sm_80)"
        return Check(name, "warning", found, "use a GPU of sm_80 or later, or --device cpu")
    how = "interpreted" if environ.get("TRITON_INTERPRET", "0") not in ("", "0") else "compiled"
    return Check(name, "info", f"Triton ({how}), because tensors are on the GPU")


def _system() -> Check:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Linux":
        return Check("system", "ok", found)
    return Check("system", "warning", f"{found}; tested on Linux only", "if a run hangs, try Linux")


def _cores(environ: Mapping[str, str]) -> Check:
    threads = environ.get("OMP_NUM_THREADS")
    shared = (
        f"OMP_NUM_THREADS={threads} for every rank"
        if threads
        else "shared evenly between the ranks"
    )
    return Check("CPU cores", "ok", f"{num_cores()}, {shared}")


def _memory() -> Check:
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total, free = (
            os.sysconf("SC_PHYS_PAGES") * page_bytes,
            os.sysconf("SC_AVPHYS_PAGES") * page_bytes,
        )
    except (ValueError, OSError):
        return Check("memory", "info", "unknown")
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    if total < LOW_MEMORY_BYTES:
        return Check("memory", "warning", found, "use --nproc 1 and --model tiny")
    return Check("memory", "ok", found)


def _shared_memory() -> Check:
    if not os.path.isdir("/dev/shm"):
        return Check("/dev/shm", "info", "none on this system")
    usage = shutil.disk_usage("/dev/shm")
    found = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f} GiB"
    if torch.cuda.is_available() and usage.free < MIN_SHARED_MEMORY_BYTES:
        return Check(
            "/dev/shm",
            "warning",
            found,
            "NCCL uses it between GPUs: give the container --shm-size=1g",
        )
    return Check("/dev/shm", "ok", found)


def _gpus() -> tuple[Check, ...]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built is None:
            return (Check("GPU", "info", "none: this torch is built for the CPU"),)
        return (
            Check(
                "GPU",
                "warning",
                f"none that torch (built for {built}) can use",
                "look at nvidia-smi",
            ),
        )
    checks = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        memory_gib = properties.total_memory / GIB
        found = f"{properties.name}, {architecture}, {memory_gib:.0f} GiB"
        checks.append(Check(f"GPU {index}", "ok", found))
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return (*checks, Check("CUDA", "ok", toolkit))


def _gloo() -> Check:
    if dist.is_available() and dist.is_gloo_available():
        return Check("gloo", "ok", "available")
    status: Status = "info" if torch.cuda.is_available() else "error"
    return Check(
        "gloo", status, "not in this torch", "install a torch built with torch.distributed"
    )


def _nccl() -> Check:
    if dist.is_available() and dist.is_nccl_available():
        found = (
            ".".join(str(part) for part in torch.cuda.nccl.version())
            if torch.cuda.is_available()
            else "available"
        )
        return Check("NCCL", "ok", found)
    if torch.cuda.is_available():
        return Check(
            "NCCL", "error", "not in this torch", "install a torch for CUDA, or --device cpu"
        )
    return Check("NCCL", "info", "not in this torch; a CPU needs none")


def _loopback() -> Check:
    """Send one byte to ourselves over a free port of 127.0.0.1, as ranks on one machine will."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    accepted.settimeout(2)
                    received = accepted.recv(1)
    except OSError as error:
        return Check("loopback", "error", f"127.0.0.1: {error}", "bring the loopback interface up")
    assert received == b"x", "one byte sent, one received"
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    if sys.platform == "linux" and "lo" not in names:
        return Check(
            "loopback",
            "error",
            f"no interface named lo among {names}",
            "set GLOO_SOCKET_IFNAME to the right one",
        )
    return Check("loopback", "ok", f"127.0.0.1 works (free port {port} found)")


def _device_used() -> Check:
    num_ranks = default_num_ranks("auto")
    try:
        choice = choose_device("auto", num_ranks)
    except OptionsError as error:
        return Check("device used", "error", str(error))
    where = (
        f"{choice.kind} with {choice.backend}"
        if num_ranks > 1 or choice.kind == "cuda"
        else choice.kind
    )
    backend = (
        ""
        if num_ranks > 1 or choice.kind == "cuda"
        else f", {choice.backend} between ranks (--nproc N)"
    )
    return Check("device used", "info", f"{where}{backend}, because {choice.reason}")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _triton_that_torch_wants() -> str | None:
    for requirement in metadata.requires("torch") or ():
        name, _, rest = requirement.partition("==")
        if name.strip() in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"):
            return rest.split(";")[0].strip()
    return None


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
