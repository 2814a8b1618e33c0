"""What a start from the meta device refuses: by name, on all ranks, before anything has changed."""

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.sharding.meta_models import Custom, Scale, Tied, gpt, on_meta, set_own
from sidestream.training.model import GPT, Block


class Unset(nn.Module):
    """A reset that leaves out what it is told to."""

    def __init__(self, left_out: str) -> None:
        super().__init__()
        self.left_out = left_out
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.register_buffer("angles", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.linear = nn.Linear(2, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all but one."""
        for name in {"weight", "angles", "count", "mask"} - {self.left_out}:
            nn.init.ones_(getattr(self, name))
        if self.left_out == "a row":
            self.weight.data[1].fill_(float("nan"))
        if self.left_out == "the shape" and not self.weight.is_meta:
            self.weight = nn.Parameter(torch.ones(2, 3))
        if self.left_out == "an attribute":
            self.table = torch.ones(2, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """One use."""
        return self.linear(x @ self.weight)


UNSET = {
    "weight": r"'layer\.weight' not everywhere, since it has NaN",
    "a row": r"'layer\.weight' not everywhere, since it has NaN",
    "angles": r"'layer\.angles' not everywhere, since it has NaN",
    "count": r"'layer\.count' not at all",
    "mask": r"'layer\.mask' not at all",
    "the shape": r"'layer\.weight' to torch\.float32 \(2, 3\) instead of torch\.float32 \(3, 2\)",
    "an attribute": r"no tensors on the meta device but parameters and buffers, got 'layer\.table'",
}


def holder(left_out: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(3, 3))
    model.add_module("layer", Unset(left_out))
    return model


def is_unset(_rank: int, _world_size: int, left_out: str) -> None:
    model = on_meta(lambda: holder(left_out))
    before = {name: id(tensor) for name, tensor in tensors_of(model).items()}
    with pytest.raises(ValueError, match=UNSET[left_out]):
        ss.fully_shard(model, fsdp_unit_modules=[Unset], init_model_with_meta_device=True)
    assert {name: id(tensor) for name, tensor in tensors_of(model).items()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.layer.left_out = ""
    vars(model.layer).pop("table", None)
    ss.fully_shard(model, fsdp_unit_modules=[Unset], init_model_with_meta_device=True)
    assert model(torch.ones(1, 3)).isfinite().all()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("left_out", UNSET)
def test_what_is_left_unset_is_named_and_nothing_changed(left_out: str) -> None:
    run_on_ranks(is_unset, 2, left_out)


def test_modules_that_nothing_sets_are_named() -> None:
    model = on_meta(Custom)
    with pytest.raises(
        ValueError, match=r"'layers\.0\.1' of class Scale \(scale, angles, order\); 'layers\.1\.1'"
    ):
        ss.fully_shard(model, init_model_with_meta_device=True)
    assert all(param.is_meta for param in model.parameters())


def test_without_the_option_the_error_names_it() -> None:
    with pytest.raises(
        ValueError, match=r"on the meta device: materialise it .*init_model_with_meta_device="
    ):
        ss.fully_shard(on_meta(gpt))


@pytest.mark.parametrize("value", [1, "reset", None, nn.Linear], ids=str)
def test_other_options_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"init_model_with_meta_device: expected True, False or a"):
        ss.fully_shard(nn.Linear(2, 2), init_model_with_meta_device=value)


def test_a_write_to_another_module_is_refused() -> None:
    def set_all(module: nn.Module) -> None:
        if isinstance(module, GPT):
            for param in module.parameters():
                param.data.normal_()
        else:
            for param in module.parameters(recurse=False):
                param.data.normal_()

    model = on_meta(gpt)
    with pytest.raises(RuntimeError, match=r"got a write to 'token_embedding\.weight'") as caught:
        ss.fully_shard(model, fsdp_unit_modules=[Block], init_model_with_meta_device=set_all)
    assert caught.value.__notes__ == [
        "while module '' was initialised (init_model_with_meta_device)"
    ]
    assert all(param.is_meta for param in model.parameters())
    # All in one unit, all of it is at hand.
    ss.fully_shard(model, init_model_with_meta_device=set_all)


def fails_on_one_rank(rank: int, _world_size: int) -> None:
    def set_own_but(module: nn.Module) -> None:
        if rank == 1 and isinstance(module, Scale):
            raise KeyError("no such scale")
        set_own(module)

    model = on_meta(Custom)
    units = {"fsdp_unit_modules": [nn.Sequential]}
    kind, text = (KeyError, "no such scale") if rank == 1 else (RuntimeError, "rank 1: .*no such")
    with pytest.raises(kind, match=text):
        ss.fully_shard(model, init_model_with_meta_device=set_own_but, **units)
    assert all(param.is_meta for param in model.parameters())
    ss.fully_shard(model, init_model_with_meta_device=set_own, **units)


def test_a_failure_of_one_rank_is_raised_on_all() -> None:
    run_on_ranks(fails_on_one_rank, 3)


def differ(rank: int, _world_size: int) -> None:
    ss.fully_shard(on_meta(Tied), init_model_with_meta_device=set_own if rank else True)


def test_ranks_with_different_initialisers_are_refused() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1: init_model_with_meta_device is 'a function'"):
        run_on_ranks(differ, 2)


def test_state_of_an_optimizer_on_the_meta_device_is_refused() -> None:
    model = on_meta(Tied)
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(ValueError, match=r"got 'sum' of param_groups\[0\]\['params'\]\[0\] on the"):
        ss.fully_shard(model, optimizer, init_model_with_meta_device=True)
    assert all(param.is_meta for param in model.parameters())
