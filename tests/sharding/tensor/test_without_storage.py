"""What asks a sharded tensor for memory or values of the whole is told what to call instead."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss


def _safetensors(state: dict[str, Tensor]) -> None:
    """As safetensors looks for shared memory."""
    for tensor in state.values():
        try:
            tensor.untyped_storage().data_ptr()
        except Exception:  # noqa: BLE001 - as safetensors does
            try:
                tensor.storage().data_ptr()
            except NotImplementedError:
                continue


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "untyped_storage": lambda tensor: tensor.untyped_storage(),
    "storage": lambda tensor: tensor.storage(),
    "data_ptr": lambda tensor: tensor.data_ptr(),
    "save_file": lambda tensor: _safetensors({"weight": tensor}),
    "torch.save": lambda tensor: torch.save({"weight": tensor}, io.BytesIO()),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_whoever_saves_is_told_to_take_the_full_state(ask: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    ss.fully_shard(model)
    for tensor in (model[0].weight, model[0].weight.detach(), model.state_dict()["0.weight"]):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            ask(tensor)
        assert "'0.weight'" in str(caught.value)
        assert "state_dict=full_state_dict(model)" in str(caught.value)


@pytest.mark.parametrize("method", ["numpy", "tolist", "__array__"])
def test_whoever_wants_values_is_told_how_to_get_them(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    ss.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'0.weight'.*full_tensor\(\).*to_local\(\)"):
        getattr(model[0].weight, method)()
    assert model[0].weight.full_tensor().detach().numpy().shape == (8, 6)


def test_elementwise_error_names_the_other_ways_in() -> None:
    model = nn.Sequential(nn.Linear(6, 8))
    ss.fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        model[0].weight @ torch.ones(6)
    for way in ("not its .forward", "register_forward_method(module, name)", "gathered(module)"):
        assert way in str(caught.value)
