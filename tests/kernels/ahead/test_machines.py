"""Occupancy against NVIDIA's own calculator, a header in Triton's wheel; times, the budgets."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import triton.backends.nvidia

from sidestream.kernels.ahead import compile as aot
from sidestream.kernels.ahead import machines

HEADER_FOLDER = Path(triton.backends.nvidia.__file__).parent / "include"
COMPILER = shutil.which("cc") or shutil.which("gcc")
REGISTERS = (0, 16, 24, 32, 33, 40, 41, 48, 56, 64, 65, 80, 96, 97, 128, 129, 168, 255)
SHARED = (0, 16, 128, 129, 1024, 4096, 8192, 20000, 48 * 1024)
WARPS = (1, 4, 8, 16, 32)
CALCULATOR = r"""
#include <cuda_occupancy.h>
#include <stdio.h>
int main(void) {
    int major, minor, warps_at_most, registers, warps;
    size_t shared_at_most, shared;
    while (scanf("%d %d %d %zu %d %zu %d", &major, &minor, &warps_at_most, &shared_at_most,
                 &registers, &shared, &warps) == 7) {
        cudaOccDeviceProp device = {0};
        device.computeMajor = major; device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = 32 * warps_at_most;
        device.regsPerBlock = 65536; device.regsPerMultiprocessor = 65536;
        device.warpSize = 32; device.sharedMemPerBlock = 49152;
        device.sharedMemPerMultiprocessor = shared_at_most; device.numSms = 1;
        device.sharedMemPerBlockOptin = shared_at_most - 1024;
        device.reservedSharedMemPerBlock = 1024;
        cudaOccFuncAttributes kernel = {0};
        kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers;
        kernel.sharedSizeBytes = shared; kernel.numBlockBarriers = 1;
        cudaOccDeviceState state = {0};
        state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
        cudaOccResult result;
        int error = cudaOccMaxActiveBlocksPerMultiprocessor(
            &result, &device, &kernel, &state, 32 * warps, 0);
        printf("%d\n", error ? -error : result.activeBlocksPerMultiprocessor);
    }
    return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_occupancy_is_that_of_the_calculator(tmp_path):
    source, program = tmp_path / "calculator.c", tmp_path / "calculator"
    source.write_text(CALCULATOR)
    command = [COMPILER, "-w", "-I", str(HEADER_FOLDER), str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=60)
    cases = list(itertools.product(machines.MULTIPROCESSORS, REGISTERS, SHARED, WARPS))
    lines = []
    for target, registers, shared, warps in cases:
        limits = machines.MULTIPROCESSORS[target]
        number = int(target.removeprefix("sm_"))
        lines.append(f"{number // 10} {number % 10} {limits.warps} {limits.shared_bytes}")
        lines[-1] += f" {registers} {shared} {warps}"
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=60
    )
    blocks = [int(line) for line in done.stdout.split()]
    assert len(blocks) == len(cases)
    assert min(blocks) >= 0
    for (target, registers, shared, warps), expected in zip(cases, blocks, strict=True):
        limits = machines.MULTIPROCESSORS[target]
        found = machines.occupancy(target, registers, shared, warps)
        assert found == expected * warps / limits.warps, (target, registers, shared, warps)


def test_every_target_of_nvidia_has_limits_and_a_product():
    targets = {target for target in aot.TARGETS if target.startswith("sm_")}
    assert set(machines.MULTIPROCESSORS) == targets
    assert {gpu.target for gpu in machines.GPUS} == targets
    assert machines.gpus_of("gfx942") == ()


@pytest.mark.parametrize(
    ("name", "instructions", "moved_bytes", "budget"),
    [
        ("MXFP8", 29.0, 3 + 1 / 32, 30),
        ("MXFP4", 26.0, 2.5 + 1 / 32, 25),
        ("sum of 8 MXFP8", 120.0, 12.25, 121),
    ],
)
def test_an_h100_has_the_budgets_that_the_gates_are_made_of(
    name, instructions, moved_bytes, budget
):
    (gpu,) = (gpu for gpu in machines.GPUS if gpu.name == "H100")
    found = machines.predict(gpu, moved_bytes, instructions, 0.0)
    assert found.bound == ("bytes" if instructions < budget else "instructions"), name
    assert found.issued == pytest.approx(instructions / budget, rel=0.01)
    assert found.share == pytest.approx(min(1, budget / instructions), rel=0.01)


@pytest.mark.parametrize(
    ("integers", "bound", "longest", "target"),
    [
        (0.0, "bytes", 0.5, 0.88),
        (7.0, "bytes", 0.7, 0.88),
        (9.8, "bytes", 0.98, 0.85 / 0.98),
        (20.0, "integers", 2.0, 0.425),
    ],
)
def test_integers_have_a_pipe_of_half_the_rate(integers, bound, longest, target):
    """Ten instructions on a GPU that issues 20, or 10 of integers, while it moves an element."""
    gpu = machines.Gpu("one", "sm_90", 1, 1.0, 100.0, 128.0)
    found = machines.predict(gpu, 20.0, 10.0, integers)
    assert (found.bound, found.issued) == (bound, pytest.approx(0.5))
    assert max(found.issued, found.integers) == pytest.approx(longest)
    assert found.share == pytest.approx(min(1, 1 / longest))
    assert found.target(0.88) == pytest.approx(target)
