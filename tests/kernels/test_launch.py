"""Launch configurations: powers of two, and 16 bytes a thread for the narrowest side."""

import pytest
import torch

from sidestream.kernels import LaunchConfig, launch, op, pack_
from sidestream.kernels.cases import cases
from sidestream.kernels.pack import kernel, sum


@pytest.mark.parametrize("world", [1, 4, 5, 1024], ids="world {}".format)
def test_every_thread_has_whole_accesses(world):
    for config in (kernel.default_config(), sum.default_config(world)):
        threads = config.num_warps * launch.THREADS_PER_WARP
        assert config.block_bytes % (threads * launch.ACCESS_BYTES) == 0


def test_a_recorded_launch_runs_nothing_and_has_all_that_a_compiler_needs():
    flat, tensors = torch.zeros(512), [torch.ones(300), torch.ones(7, dtype=torch.bfloat16)]
    with op.launching_on_cpu(), launch.recorded() as record:
        pack_(flat, tensors, [0, 384], scale=0.5)
    (found,) = record
    assert flat.eq(0).all()
    assert found.kernel is kernel._pack_kernel
    assert found.programs == 2
    assert found.arguments["flat"] is flat
    assert found.arguments["scale"] == 0.5
    assert set(found.arguments) | set(found.constants) == set(found.kernel.arg_names)
    constants = {"UNPACK": False, "ACCUMULATE": False, "STEPS": 1, "TILE_BYTES": 8192}
    assert found.constants == constants
    pack_(flat, tensors, [0, 384])
    assert flat[:300].eq(1).all(), "the block has ended"


def _specialised(record):
    """The arguments for whose values or alignment Triton would compile the launch anew."""
    for parameter in record.kernel.params:
        value = record.arguments.get(parameter.name)
        if isinstance(value, torch.Tensor):
            is_plain = parameter.do_not_specialize_on_alignment
        else:  # of floating-point numbers Triton asks the type alone
            is_plain = value is None or isinstance(value, float) or parameter.do_not_specialize
        if not (is_plain or parameter.is_constexpr):
            yield record.kernel.__name__, parameter.name


def test_no_argument_is_compiled_anew_for_its_value():
    """Of a kernel of any case: what changes the code on purpose is a constant."""
    records = [record for case in cases() for record in case.launches()]
    found = {argument for record in records for argument in _specialised(record)}
    assert len({record.kernel for record in records}) > 20
    assert found == set()


def test_a_record_within_another_ends_alone():
    flat = torch.zeros(128)
    with op.launching_on_cpu(), launch.recorded() as outer:
        with launch.recorded() as inner:
            pass
        pack_(flat, [torch.ones(128)], [0])
    assert (len(outer), len(inner)) == (1, 0)


@pytest.mark.parametrize(("block_bytes", "num_warps"), [(0, 4), (3000, 4), (4096, 3), (-8, 4)])
def test_not_a_power_of_two_is_refused(block_bytes, num_warps):
    with pytest.raises(ValueError, match=r"expected a power of two, got -?\d+; round it up"):
        LaunchConfig(block_bytes, num_warps)


def test_cpu_has_no_hardware_conversion():
    assert launch.hardware_on(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("capability", "level"),
    [
        ((8, 0), 0),
        ((8, 9), 0),
        ((9, 0), launch.FP8),
        ((10, 0), launch.FP4),
        ((10, 3), launch.FP4),
        ((12, 0), launch.FP4),
        ((12, 1), launch.FP4),
        ((13, 0), launch.FP8),
    ],
    ids=str,
)
def test_hardware_of_a_capability(capability, level):
    assert launch.hardware_of(capability) == level
