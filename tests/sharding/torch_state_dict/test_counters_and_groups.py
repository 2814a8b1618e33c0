"""Counters of parameters that train for different numbers of steps, and models over some of the
ranks, through torch.distributed.checkpoint and its state-dict API.
"""

import copy
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.torch_state_dict.models import (
    FULL,
    MARKS,
    Both,
    are_equal,
    make_plain,
    make_sharded,
    train,
    whole,
)

pytestmark = MARKS


# ---- every parameter's own counter


def _unfrozen_later(both: Both, until: int) -> Both:
    """Step `until` times; the last layer trains from step 2 on, the first from step 4 on."""
    for step in range(until + 1):
        both[0][4].requires_grad_(step >= 2)
        both[0][0].requires_grad_(step >= 4)
        if step < until:
            train(both, step)
    return both


def _counted(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    for zero in range(4):
        # Unfrozen steps ago, and just now, when it has no state yet.
        for until in (3, 4):
            expected = whole(_unfrozen_later(make_plain(0), until + 1))
            for api in ("load_state_dict", "set_optimizer_state_dict", "full"):
                saved = _unfrozen_later(make_sharded(0, zero), until)
                case = f"{api}, ZeRO-{zero}, {until} steps"
                loaded = _unfrozen_later(make_sharded(1, zero), 0)
                _through(api, saved, loaded, f"{folder}/{case}", until)
                loaded[0][4].requires_grad_(until >= 2)
                loaded[0][0].requires_grad_(until >= 4)
                if not are_equal(whole(train(loaded, until)), expected):
                    wrong.append(case)
    return wrong


def _through(api: str, saved: Both, loaded: Both, path: str, until: int) -> None:
    if api == "load_state_dict":
        loaded[0].load_state_dict(saved[0].state_dict())
        loaded[1].load_state_dict(saved[1].state_dict())
        return
    options = FULL if api == "full" else StateDictOptions()
    state = {"m": get_model_state_dict(saved[0], options=options)}
    state["o"] = get_optimizer_state_dict(*saved, options=options)
    loaded[0][4].requires_grad_(until > 2)  # as they were when they last stepped
    loaded[0][0].requires_grad_(until > 4)
    if api != "full":
        dcp.save(state, checkpoint_id=path)
        state = {"m": get_model_state_dict(loaded[0]), "o": get_optimizer_state_dict(*loaded)}
        dcp.load(state, checkpoint_id=path)
    set_model_state_dict(loaded[0], state["m"], options=options)
    set_optimizer_state_dict(*loaded, state["o"], options=options)


@pytest.mark.parametrize("world", [1, 2])
def test_each_parameter_resumes_with_its_own_counter(tmp_path: Path, world: int) -> None:
    assert run_on_ranks(_counted, world, str(tmp_path), timeout_s=60) == [[]] * world


# ---- a model over some of the ranks


def _over_two_of_four(rank: int, world: int) -> list[str]:
    wrong = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = rank // 2
    for zero in range(4):
        both = make_sharded(stage, zero, device_mesh=mesh["shard"])
        plain = train(make_plain(stage))
        train(both)
        state = {
            "m": get_model_state_dict(both[0], options=FULL),
            "o": get_optimizer_state_dict(*both, options=FULL),
        }
        other = make_sharded(7, zero, device_mesh=mesh["shard"])
        set_model_state_dict(other[0], copy.deepcopy(state["m"]), options=FULL)
        set_optimizer_state_dict(*other, copy.deepcopy(state["o"]), options=FULL)
        for name, got in (("saved", both), ("loaded", other)):
            if not are_equal(whole(got), whole(plain)):
                wrong.append(f"{name}, ZeRO-{zero}")
        if not are_equal(list(state["m"].values()), list(plain[0].state_dict().values())):
            wrong.append(f"gathered, ZeRO-{zero}")
    dist.barrier()
    return wrong


def test_a_model_over_some_of_the_ranks_is_gathered_over_these() -> None:
    assert run_on_ranks(_over_two_of_four, 4) == [[]] * 4
