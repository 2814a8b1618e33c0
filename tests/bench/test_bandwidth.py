"""What rates are held against: the bytes of a case, by kernels with accesses of 16 bytes."""

import pytest
import torch

from sidestream.bench import bandwidth, bandwidth_kernels
from sidestream.kernels.ahead.compile import compile_launch
from sidestream.kernels.launch import recorded

CPU = torch.device("cpu")


def test_a_copy_moves_the_bytes_of_the_case_in_as_many_places(monkeypatch):
    seen = []

    def copy_(target, source):
        seen.append((target.data_ptr(), target.nbytes + source.nbytes))

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    (calls,) = bandwidth.copies(6144, CPU, 2).values()
    for call in calls:
        call()
    assert [num_bytes for _, num_bytes in seen] == [6144, 6144]
    assert len({place for place, _ in seen}) == 2


def test_a_read_is_of_all_the_bytes():
    (calls,) = bandwidth.reads(6144, CPU, 1).values()
    assert calls[0]() == 6144 / 4


@pytest.mark.parametrize(
    ("function", "stores"),
    [(bandwidth_kernels.copy_, {128}), (bandwidth_kernels.read_, {32})],
    ids=["copy", "read"],
)
def test_kernels_have_accesses_of_16_bytes(function, stores):
    with recorded() as launches:
        function(torch.empty(1 << 16), torch.empty(1 << 16))
    compiled = compile_launch(launches[0], "sm_90")
    accesses = [step.access for step in compiled.instructions if step.access is not None]
    assert {one.bits for one in accesses if one.is_load} == {128}
    assert {one.bits for one in accesses if not one.is_load} == stores
