"""Launch configurations: powers of two, and 16 bytes a thread for the narrowest side."""

import pytest

from sidestream.kernels import LaunchConfig, launch


@pytest.mark.parametrize("world", [1, 4, 5, 1024], ids="world {}".format)
def test_every_thread_has_whole_accesses(world):
    for config in (launch.pack_config(), launch.reduce_config(world)):
        threads = config.num_warps * launch.THREADS_PER_WARP
        assert config.block_bytes % (threads * launch.ACCESS_BYTES) == 0


def test_a_configuration_is_made_once():
    for number in range(1, 3):
        assert launch.reduce_config(number) is launch.reduce_config(number)
    assert launch.pack_config() is launch.pack_config()


@pytest.mark.parametrize(("block_bytes", "num_warps"), [(0, 4), (3000, 4), (4096, 3), (-8, 4)])
def test_not_a_power_of_two_is_refused(block_bytes, num_warps):
    with pytest.raises(ValueError, match=r"expected a power of two, got -?\d+; round it up"):
        LaunchConfig(block_bytes, num_warps)
