"""What `fully_shard` and its companions refuse: a clear error, before anything has been changed."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import sidestream as ss
from sidestream.sharding.optim import flat_runs
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.sharding.trainer import Block, Transformer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Whitening(torch.optim.Optimizer):
    """Unknown to sidestream."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=group["lr"])


class LayerwiseAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class FakesGradient(nn.Parameter):
    @property
    def requires_grad(self) -> bool:
        return True


def integer_parameter(model: nn.Module) -> None:
    model.counts = nn.Parameter(torch.arange(3), requires_grad=False)
    model.counts.__class__ = FakesGradient


def meta_parameter(model: nn.Module) -> None:
    model.head = nn.Linear(3, 3, device="meta")


def hooked_parameter(model: nn.Module) -> None:
    model.head.weight.register_hook(lambda grad: grad)


def meta_buffer(model: nn.Module) -> None:
    model.register_buffer("table", torch.zeros(2, device="meta"))


def double_parameter(model: nn.Module) -> None:
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.float64))


Change = Callable[[nn.Module], None]
BAD: dict[str, tuple[type[Exception], str, dict[str, Any], Change | None]] = {
    "unknown strategy": (
        ValueError,
        r"zero_dp_strategy: expected one of 0 or 'no_shard'.*, got 7; pass one of them$",
        {"zero_dp_strategy": 7},
        None,
    ),
    "strategy name": (ValueError, "got 'zero3'", {"zero_dp_strategy": "zero3"}, None),
    "strategy True": (ValueError, "got True", {"zero_dp_strategy": True}, None),
    "unit that matches nothing": (
        ValueError,
        r"got .*Conv2d, which matches no module; name some of Attention, Block, .*Transformer",
        {"fsdp_unit_modules": [nn.Conv2d]},
        None,
    ),
    "unit path": (
        ValueError,
        r"got 'nowhere.Block' \(No module .*\); correct it, or pass the class itself$",
        {"fsdp_unit_modules": ["nowhere.Block"]},
        None,
    ),
    "name of no class": (
        ValueError,
        r"got 'Blok', which match no module; name some of Attention, Block, .*Transformer",
        {"fsdp_unit_modules": "Blok"},
        None,
    ),
    "unit that is no module": (
        TypeError,
        "expected nn.Module classes",
        {"fsdp_unit_modules": [int]},
        None,
    ),
    "container as unit": (
        ValueError,
        "ModuleList, which is never called",
        {"fsdp_unit_modules": [nn.ModuleList]},
        None,
    ),
    "dict as policy": (
        TypeError,
        r"expected a sidestream.MixedPrecisionPolicy, got dict of builtins; pass sidestream.Mixed",
        {"mixed_precision_policy": {"param_dtype": torch.bfloat16}},
        None,
    ),
    "dimension without mesh": (
        ValueError,
        "expected a device_mesh that has dimension 'dp'",
        {"dp_shard_dim": "dp"},
        None,
    ),
    "integer parameter that requires grad": (
        ValueError,
        "'counts' has dtype torch.int64 and requires grad",
        {},
        integer_parameter,
    ),
    "meta parameter": (
        ValueError,
        "'head.weight' is on the meta device.*'head.bias'",
        {},
        meta_parameter,
    ),
    "hooks": (ValueError, r"'head.weight' has gradient hooks", {}, hooked_parameter),
    "meta buffer": (ValueError, r"buffer 'table' is on the meta device", {}, meta_buffer),
    "double": (ValueError, "'extra' has dtype torch.float64", {}, double_parameter),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_refuses_before_changing_anything(
    case: tuple[type[Exception], str, dict[str, Any], Change | None],
) -> None:
    kind, message, options, change = case
    model = Transformer()
    if change is not None:
        change(model)
    optimizer = adamw(model) if change is None else None
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(kind, match=message):
        ss.fully_shard(model, optimizer, **options)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_refuses_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"module: expected a torch.nn.Module, got list"):
        ss.fully_shard([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"at least one floating-point parameter"):
        ss.fully_shard(nn.ReLU())


@pytest.mark.parametrize("outer", [False, True], ids=["again", "around it"])
def test_refuses_to_shard_twice(outer: bool) -> None:
    model = Transformer()
    ss.fully_shard(model)
    with pytest.raises(
        ValueError, match=r"'.*embedding.weight' is sharded already: call fully_shard once"
    ):
        ss.fully_shard(nn.Sequential(model) if outer else model)


def test_refuses_foreign_parameters() -> None:
    model = Transformer()
    foreign = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": foreign.parameters()}], lr=0.1
    )
    with pytest.raises(
        ValueError, match=re.escape("a foreign one at param_groups[1]['params'][0], shape (2, 3)")
    ):
        ss.fully_shard(model, optimizer)
    assert not isinstance(model.head.weight, ss.ShardedTensor)


def test_refuses_optimizer_from_before_sharding() -> None:
    model = Transformer()
    optimizer = adamw(model)
    ss.fully_shard_model(model)
    with pytest.raises(
        ValueError, match=r"make the optimizer from module.parameters\(\) after fully_shard"
    ):
        ss.fully_shard_optimizer(optimizer)


def test_refuses_to_bind_an_optimizer_twice() -> None:
    model = Transformer()
    optimizer = adamw(model)
    ss.fully_shard(model, optimizer)
    with pytest.raises(ValueError, match=r"bound by fully_shard before"):
        ss.fully_shard_optimizer(optimizer)


def test_refuses_an_optimizer_over_part_of_another_ones_parameters() -> None:
    model = Transformer()
    _, first = ss.fully_shard(model, adamw(model), fsdp_unit_modules=[Block])
    before = [id(param) for group in first.param_groups for param in group["params"]]
    with pytest.raises(
        ValueError, match=r"no other optimizer updates, got head.weight, which another one holds"
    ):
        ss.fully_shard_optimizer(torch.optim.SGD([model.head.weight], lr=0.1))
    assert [id(param) for group in first.param_groups for param in group["params"]] == before
    # One that takes over everything is no mistake, nor is one after the other is gone.
    ss.fully_shard_optimizer(adamw(model))
    del first
    ss.fully_shard_optimizer(torch.optim.SGD([model.head.weight], lr=0.1))


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_refuses_gradient_hooks_on_sharded_parameters(method: str) -> None:
    model = Transformer()
    ss.fully_shard(model)
    with pytest.raises(
        RuntimeError, match=rf"{method}: sharded parameter 'head.weight'.*would never be called"
    ):
        getattr(model.head.weight, method)(print)


def test_refuses_to_share_memory() -> None:
    model = Transformer()
    ss.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"share_memory_: sharded parameter 'embedding.weight'"):
        model.share_memory()


def test_refuses_torch_func_and_goes_on() -> None:
    model = nn.Linear(3, 2)
    ss.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"expected a forward outside torch.func"):
        torch.func.grad(lambda x: model(x).sum())(torch.ones(3))
    assert model(torch.ones(3)).shape == (2,)


def test_refuses_to_clip_what_was_only_accumulated() -> None:
    model = Transformer()
    ss.fully_shard(model, fsdp_unit_modules=[Block])
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with ss.no_sync(model):
        model(tokens).sum().backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: expected exchanged gradients, unit"):
        ss.clip_grad_norm_(model, 1.0)
    model(tokens).sum().backward()
    assert ss.clip_grad_norm_(model, 1.0) > 0


NOT_ELEMENTWISE: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "LBFGS": (
        lambda model: torch.optim.LBFGS(model.parameters()),
        "got LBFGS: it takes inner products",
    ),
    "Adafactor": (
        lambda model: torch.optim.Adafactor(model.parameters()),
        "got Adafactor: it factors",
    ),
    "Muon": (
        lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
        "got Muon: it orthogonalises",
    ),
    "unknown": (lambda model: Whitening(model.parameters()), "Whitening; if each element's update"),
    "subclass with its own step": (
        lambda model: LayerwiseAdamW(model.parameters()),
        "LayerwiseAdamW; if each",
    ),
}


@pytest.mark.parametrize("case", NOT_ELEMENTWISE.values(), ids=NOT_ELEMENTWISE)
def test_refuses_optimizers_that_are_not_elementwise(case: tuple[Any, str]) -> None:
    make, message = case
    model = Transformer()
    with pytest.raises(ValueError, match=message):
        ss.fully_shard(model, make(model))
    assert not isinstance(model.head.weight, ss.ShardedTensor)


def test_takes_an_unknown_optimizer_that_is_vouched_for() -> None:
    model = Transformer()
    _, optimizer = ss.fully_shard(model, Whitening(model.parameters()), elementwise=True)
    assert isinstance(optimizer, Whitening)


def test_refuses_modules_that_are_not_sharded() -> None:
    model = Transformer()
    with pytest.raises(
        ValueError, match=r"expected the module that was passed to fully_shard, got a Transformer"
    ):
        ss.clip_grad_norm_(model, 1.0)
    ss.fully_shard(model)
    with pytest.raises(ValueError, match=r"got a NoneType"), ss.no_sync(None):  # type: ignore
        pass
    with pytest.raises(ValueError, match=r"got a Block"):
        ss.summary(model.blocks[0])
    with pytest.raises(TypeError, match=r"grad_comm_dtype: expected None"):
        ss.MixedPrecisionPolicy(grad_comm_dtype=torch.float64)


def test_refuses_a_parameter_that_was_replaced() -> None:
    model = Transformer()
    ss.fully_shard(model, fsdp_unit_modules=[Block])
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight.full_tensor()))
    with pytest.raises(RuntimeError, match=r"parameter 'head\.weight': expected the object"):
        model(torch.zeros(2, 3, dtype=torch.int64))


def test_refuses_a_forward_that_bypasses_the_unit() -> None:
    model = Transformer()
    ss.fully_shard(model, fsdp_unit_modules=[Block])
    with pytest.raises(
        RuntimeError, match=r"'blocks.0.norm.weight'.*call the unit's module itself"
    ):
        model.blocks[0].forward(torch.zeros(2, 3, 12))


@pytest.mark.parametrize("run_numel", [1, 2**30], ids=["cut", "whole"])
def test_refuses_freezing_beside_trainable_ones(run_numel: int) -> None:
    model = Transformer()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with mock.patch.object(flat_runs, "CACHED_RUN_NUMEL", run_numel):
        ss.fully_shard(model, adamw(model), fsdp_unit_modules=[Block])
    with torch.no_grad():
        model(tokens)
    model.head.weight.requires_grad_(False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"frozen \['head.weight'\] beside trainable ones"):
            model(tokens)
    model.head.weight.requires_grad = True
    assert model(tokens).requires_grad


@pytest.mark.parametrize("call", [ss.save_checkpoint, ss.load_checkpoint], ids=["save", "load"])
def test_refuses_checkpoints_of_optimizers_of_other_models(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    model, plain = Transformer(), Transformer()
    _, optimizer = ss.fully_shard(model, adamw(model))
    ss.save_checkpoint(tmp_path / "c", model, optimizer)
    with pytest.raises(ValueError, match=r"the module that was passed to fully_shard.*shard it"):
        call(tmp_path / "c", plain, adamw(plain))
    with pytest.raises(ValueError, match=r"the optimizer that fully_shard bound to this module"):
        call(tmp_path / "c", model, adamw(plain))
    ss.load_checkpoint(tmp_path / "c", model, optimizer)


def saves_where_it_cannot(rank: int, world_size: int, path: str) -> str:
    model = Transformer()
    _, optimizer = ss.fully_shard(model, adamw(model), fsdp_unit_modules=[Block])
    with (
        mock.patch.object(dcp, "save", side_effect=AssertionError("began to write")),
        pytest.raises(OSError) as caught,
    ):
        ss.save_checkpoint(path, model, optimizer, extra=rank)
    assert caught.type is OSError
    return str(caught.value)


UNWRITABLE = {
    "below a file": "file/run/c",
    "name too long": "c" * 300,
    "nobody can make folders there": "/proc/nope",
}


@pytest.mark.parametrize("path", UNWRITABLE.values(), ids=UNWRITABLE)
def test_refuses_an_unwritable_checkpoint_path_on_every_rank(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    target = str(tmp_path / path)
    messages = run_on_ranks(saves_where_it_cannot, 2, target, timeout_s=60)
    for message in messages:
        assert f"path: expected a place where rank 0 can make a folder, got {target}" in message
        assert message.endswith("; give a path that this user can write to")
    assert messages[1] == f"rank 0: {messages[0]}"
    assert os.listdir(tmp_path) == ["file"]


def mesh_mistakes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Transformer()
    with pytest.raises(
        ValueError, match=r"one of the mesh's dimension names \['replicate', 'shard'\], got 'dp'"
    ):
        ss.fully_shard(model, device_mesh=mesh, dp_shard_dim="dp")
    with pytest.raises(ValueError, match=r"device_mesh has 2 dimensions .* got None"):
        ss.fully_shard(model, device_mesh=mesh)
    assert not isinstance(model.head.weight, ss.ShardedTensor)
    ss.fully_shard(model, device_mesh=mesh, dp_shard_dim="shard")
    assert ss.summary(model).world_size == 2


def test_refuses_a_wrong_mesh_dimension() -> None:
    run_on_ranks(mesh_mistakes, 4)


def distributed_parameters(rank: int, world_size: int) -> None:
    model = Transformer()
    distribute_module(model.head, init_device_mesh("cpu", (world_size,)))
    with pytest.raises(ValueError, match=r"'head.weight' is a DTensor: pass a model with plain"):
        ss.fully_shard(model)


def test_refuses_distributed_tensors() -> None:
    run_on_ranks(distributed_parameters, 1)


def differing_models(rank: int, world_size: int, kind: str) -> None:
    model = Transformer(num_blocks=2)
    if rank == 2 and kind == "shape":
        model.head = nn.Linear(12, 20)
    if rank == 2 and kind == "name":
        model.tail = model.head
        del model.head
    strategy = 2 if rank == 2 and kind == "option" else 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if kind == "lr" and rank == 2 else 0.1)
    try:
        ss.fully_shard(model, optimizer, zero_dp_strategy=strategy)
    finally:
        assert not isinstance(model.embedding.weight, ss.ShardedTensor)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shape", r"rank 2: 'head.weight' has \(shape, .*\(\(20, 12\), .*on rank 0 \(\(19, 12\)"),
        ("name", "rank 2: 'head.weight' is missing; .*rank 2: 'tail.weight' is unexpected"),
        (
            "lr",
            r"rank 2: optimizer is torch.*SGD \[\{'lr': 0.2.*, on rank 0 torch.*SGD \[\{'lr': 0.1",
        ),
        ("option", "rank 2: zero_dp_strategy is 'optim_grads', on rank 0 'optim_grads_params'$"),
    ],
)
def test_tells_by_name_and_rank_how_models_differ(kind: str, expected: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(differing_models, 3, kind)
    assert set(caught.value.failures) == {0, 1, 2}
    for text in caught.value.failures.values():
        assert "ValueError: fully_shard: expected the same model and options on every rank" in text
        assert re.search(expected, text), text
