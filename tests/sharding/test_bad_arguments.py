"""Arguments of the wrong type or out of range: an error that names the argument, what was expected
and what came, before anything has been changed.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.trainer import Block, Transformer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _named(values: list[Any]) -> list[str]:
    return [re.sub(r" at 0x\w+|\s", "", f"{value!r}")[:60] for value in values]


FLAGS = ["no", 0, None]
OPTIONS: list[tuple[str, Any, type[Exception]]] = [
    *(("overlap_grad_reduce", value, TypeError) for value in (*FLAGS, "Pipelined")),
    *(("overlap_param_gather", value, TypeError) for value in FLAGS),
    *(("elementwise", value, TypeError) for value in FLAGS),
    *(("reshard_after_forward", value, TypeError) for value in ("no", 8)),
    *(("bucket_mib", value, TypeError) for value in ("1", True, [1], 1j, torch.tensor(1.0))),
    *(("bucket_mib", value, ValueError) for value in (0, -1, math.nan, math.inf)),
    *(("split_root_mib", value, TypeError) for value in ("1", True)),
    *(("split_root_mib", value, ValueError) for value in (0, -1, math.nan, math.inf)),
    *(("prefetch", value, TypeError) for value in ("1", True, None)),
    *(("prefetch", value, ValueError) for value in (1.5, -1)),
    *(("zero_dp_strategy", value, ValueError) for value in (3.0, "3", None, torch.tensor([1, 2]))),
    *(("dp_shard_dim", value, TypeError) for value in (0, ("dp",))),
    *(("fsdp_unit_modules", value, TypeError) for value in (3, len, b"torch.nn.Linear", [None])),
]


@pytest.mark.parametrize(("name", "value", "kind"), OPTIONS, ids=_named(OPTIONS))
def test_options_of_fully_shard(name: str, value: Any, kind: type[Exception]) -> None:
    model = Transformer(num_blocks=1)
    optimizer = adamw(model)
    before = {name: id(param) for name, param in model.named_parameters()}
    got = f"{value[0]!r}" if isinstance(value, list) and name != "bucket_mib" else f"{value!r}"
    with pytest.raises(kind, match=rf"^{name}: expected .*got {re.escape(got)}; .+"):
        ss.fully_shard(model, optimizer, **{name: value})
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_whole_numbers_of_numpy_are_taken(kind: Callable[[int], Any]) -> None:
    model = Transformer(num_blocks=1)
    ss.fully_shard(model, adamw(model), prefetch=kind(2))


WRONG_TYPES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "class as module": (
        lambda model: ss.fully_shard(Transformer),
        "module: expected a torch.nn.Module, got the class Transformer; pass the model",
    ),
    "parameters as module": (
        lambda model: ss.fully_shard(model.parameters()),
        "module: expected a torch.nn.Module, got generator",
    ),
    "class as optimizer": (
        lambda model: ss.fully_shard(model, torch.optim.AdamW),
        "optimizer: expected a torch.optim.Optimizer, got the class AdamW; make one from module",
    ),
    "scheduler as optimizer": (
        lambda model: ss.fully_shard(model, torch.optim.lr_scheduler.StepLR(adamw(model), 1)),
        "optimizer: expected a torch.optim.Optimizer, got StepLR",
    ),
    "text as optimizer to bind": (
        lambda model: ss.fully_shard_optimizer("adamw"),
        "optimizer: expected a torch.optim.Optimizer, got str",
    ),
    "optimizer beside a model alone": (
        lambda model: ss.fully_shard_model(model, optimizer=adamw(model)),
        r"got an optimizer; call fully_shard\(module, optimizer\)",
    ),
    "list as mesh": (
        lambda model: ss.fully_shard(model, device_mesh=[0]),
        "device_mesh: expected a DeviceMesh, got list; make one with .*init_device_mesh",
    ),
    "block as its class": (
        lambda model: ss.fully_shard(model, fsdp_unit_modules=[model.blocks[0]]),
        "fsdp_unit_modules: .* got an instance of Block; pass its class",
    ),
    "list of blocks as their class": (
        lambda model: ss.fully_shard(model, fsdp_unit_modules=model.blocks),
        "fsdp_unit_modules: .* got an instance of Block; pass its class",
    ),
    "class as policy": (
        lambda model: ss.fully_shard(model, mixed_precision_policy=ss.MixedPrecisionPolicy),
        r"got the class MixedPrecisionPolicy of sidestream.*\(param_dtype=torch.bfloat16\)$",
    ),
    "dtype as policy": (
        lambda model: ss.fully_shard(model, mixed_precision_policy=torch.bfloat16),
        r"got dtype of torch; pass sidestream.MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)$",
    ),
    "flag of a policy": (
        lambda model: ss.MixedPrecisionPolicy(cast_forward_inputs="no"),  # type: ignore[arg-type]
        "MixedPrecisionPolicy.cast_forward_inputs: expected True or False, got 'no'",
    ),
    "text as state to gather": (
        lambda model: ss.full_state_dict("model"),  # type: ignore[arg-type]
        "module: expected a torch.nn.Module, got str",
    ),
    "list as local part": (
        lambda model: ss.ShardedTensor([3.0], (1,)),  # type: ignore[arg-type]
        "local of '': expected a plain tensor, got list",
    ),
    "number as shape": (
        lambda model: ss.ShardedTensor(torch.zeros(2), 2),  # type: ignore[arg-type]
        "expected whole numbers of at least 0, got 2 and 0",
    ),
    "negative shape": (
        lambda model: ss.ShardedTensor(torch.zeros(2), (-1, -2)),
        r"expected whole numbers of at least 0, got \(-1, -2\) and 0",
    ),
    "text as start": (
        lambda model: ss.ShardedTensor(torch.zeros(2), (2,), "0"),  # type: ignore[arg-type]
        r"expected whole numbers of at least 0, got \(2,\) and '0'",
    ),
}


@pytest.mark.parametrize("case", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_types(case: tuple[Callable[[nn.Module], Any], str]) -> None:
    call, message = case
    model = Transformer(num_blocks=1)
    with pytest.raises(TypeError, match=message):
        call(model)
    assert not isinstance(model.head.weight, ss.ShardedTensor)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32),
            ss.MixedPrecisionPolicy(torch.bfloat16, grad_comm_dtype=torch.float32),
        ),
        (
            MixedPrecisionPolicy(output_dtype=torch.float16, cast_forward_inputs=False),
            ss.MixedPrecisionPolicy(output_dtype=torch.float16, cast_forward_inputs=False),
        ),
        (
            MixedPrecision(torch.float16, torch.bfloat16, cast_forward_inputs=True),
            ss.MixedPrecisionPolicy(torch.float16, grad_comm_dtype=torch.bfloat16),
        ),
    ],
    ids=["FSDP2", "FSDP2 output", "FSDP1"],
)
def test_the_policy_of_pytorch_is_translated(theirs: Any, ours: ss.MixedPrecisionPolicy) -> None:
    with pytest.raises(TypeError, match=r"got MixedPrecision\w* of torch\.distributed") as caught:
        ss.fully_shard(Transformer(), mixed_precision_policy=theirs)
    fix = str(caught.value).partition("; pass ")[2]
    assert eval(fix, {"sidestream": ss, "torch": torch}) == ours


CLIP: list[tuple[dict[str, Any], type[Exception]]] = [
    *(({"max_norm": value}, TypeError) for value in ("1", None, True, [1.0], 1j, torch.ones(2))),
    *(({"max_norm": value}, ValueError) for value in (math.nan, -1)),
    *(({"norm_type": value}, TypeError) for value in ("x", "inf", None, True)),
    *(({"norm_type": value}, ValueError) for value in (-1, 0, 0.5, math.nan, -math.inf)),
    ({"error_if_nonfinite": "no"}, TypeError),
]


@pytest.mark.parametrize(("options", "kind"), CLIP, ids=_named(CLIP))
def test_arguments_of_clip_grad_norm(options: dict[str, Any], kind: type[Exception]) -> None:
    model = Transformer(num_blocks=1)
    ss.fully_shard(model)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert model.head.weight.grad is not None
    before = model.head.weight.grad.full_tensor()
    [(name, value)] = options.items()
    with pytest.raises(kind, match=rf"^{name}: expected .*, got {re.escape(repr(value))}; pass .+"):
        ss.clip_grad_norm_(model, **{"max_norm": 1e-3, **options})
    assert torch.equal(model.head.weight.grad.full_tensor(), before)


@pytest.mark.parametrize("part", ["the module", "a block", "around it"])
def test_assigning_a_state_dict_is_refused_at_the_call(part: str) -> None:
    model, plain = Transformer(num_blocks=1), Transformer(num_blocks=1)
    ss.fully_shard(model, fsdp_unit_modules=[Block])
    target, source = model, plain
    if part == "a block":
        target, source = model.blocks[0], plain.blocks[0]
    if part == "around it":
        target, source = nn.Sequential(model), nn.Sequential(plain)
    before = {name: id(param) for name, param in model.named_parameters()}
    values = ss.full_state_dict(model)
    with pytest.raises(RuntimeError, match=r"load_state_dict: expected assign=False .* got True"):
        target.load_state_dict(source.state_dict(), assign=True)
    assert {name: id(param) for name, param in model.named_parameters()} == before
    for name, value in ss.full_state_dict(model).items():
        assert torch.equal(value, values[name])
    target.load_state_dict(source.state_dict())
    assert torch.equal(model.blocks[0].gain.full_tensor(), plain.blocks[0].gain)


def mesh_of_others(rank: int, world_size: int) -> str | None:
    mesh = DeviceMesh("cpu", [0])
    model = Transformer(num_blocks=1)
    if rank == 0:
        ss.fully_shard(model, device_mesh=mesh)
        return None
    with pytest.raises(
        ValueError, match="device_mesh: expected a mesh of which this rank"
    ) as error:
        ss.fully_shard(model, device_mesh=mesh)
    assert not isinstance(model.head.weight, ss.ShardedTensor)
    return str(error.value)


def test_a_mesh_without_this_rank() -> None:
    message = run_on_ranks(mesh_of_others, 2)[1]
    assert "got ranks [0] on rank 1; call fully_shard on those ranks alone" in message
