"""A NaN in one rank's gradient ends the run before anything is saved, and tells where it came from;
what was saved before is whole and finite, and the run goes on from there with the same bits.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from sidestream.tests.faults.runs import complete_steps, job, run, saving
from sidestream.tests.faults.seams import Fault
from sidestream.training.checkpoints import checkpoint_path


def require_finite(folder: Path) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    assert state
    assert all(value.isfinite().all() for value in state.values() if isinstance(value, Tensor))


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize(
    "zero", [pytest.param(zero, marks=[] if zero == 3 else [pytest.mark.slow]) for zero in range(4)]
)
def test_a_nan_in_one_ranks_gradient_is_named_and_never_saved(
    zero: int, text: list[str], unbroken: Callable[..., str], tmp_path: Path
) -> None:
    saved, fault = tmp_path / "saved", Fault("backward", 1, 4, "NaN", str(tmp_path / "told"))
    options = [*job(zero), *text]
    spoilt = run([*options, *saving(saved)], 2, tmp_path, fault)
    assert spoilt.error_s is not None and not spoilt.result, spoilt
    for rank, said in spoilt.said.items():
        assert f"rank {rank} failed in step 4: NonFiniteGradientError" in said, said
        assert "'blocks.0." in said, said
    assert "rank 1" in spoilt.said[0], spoilt.said[0]
    steps = complete_steps(saved)
    assert steps[-1] == 3
    for step in steps:
        require_finite(checkpoint_path(str(saved), step))
    resumed = run([*options, *saving(saved, resume=True)], 2, tmp_path)
    assert resumed.result["params_sha256"] == unbroken(zero=zero)
