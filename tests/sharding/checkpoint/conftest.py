"""The whole checkpoint that tests damage: one of ours, and a plain one without a manifest."""

import warnings

import pytest
from torch.distributed import checkpoint as dcp

import sidestream as ss
from sidestream.sharding.checkpoint.state import names_of_params
from sidestream.sharding.optim.state import named_state
from sidestream.tests.sharding.checkpoint.whole import EXTRA, Case, everything, make


@pytest.fixture(scope="module", params=["ours", "plain"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp(request.param)
    model, optimizer = make(0)
    if request.param == "ours":
        ss.save_checkpoint(root / "c", model, optimizer, extra=EXTRA)
    else:
        state = {
            "model": model.state_dict(),
            "optim": named_state(names_of_params(model), optimizer),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=root / "c")
    other, other_optimizer = make(1)
    ss.save_checkpoint(root / "before", other, other_optimizer)
    extra = EXTRA if request.param == "ours" else None
    case = Case(root / "c", extra, everything(model, optimizer), other, other_optimizer)
    assert case.try_to_load(case.folder) == "loaded"
    return case
