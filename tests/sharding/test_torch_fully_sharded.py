"""PyTorch's FSDP2 behind our interface: against a plain model on two ranks, over gloo."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as tools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import sidestream as ss
from sidestream.sharding.process_groups import ProcessGroupCollection
from sidestream.sharding.torch_fully_sharded import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from sidestream.tests.ranks import preload, run_on_ranks

preload("torch.distributed.fsdp", "torch.distributed.tensor", "sidestream.sharding.build")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.seen: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(getattr(self.weight, "tensor_model_parallel", None))
        return x @ self.weight


class Outer(nn.Module):
    """A unit around a unit, which it names itself."""

    _fsdp_modules = (Inner,)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).relu()


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.ModuleList(Outer() for _ in range(2))
        self.last = nn.Linear(5, 7)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("repeated", torch.tensor([1.0 + seed]).expand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def _data(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _grads(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def _close(got: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def _adapter(seed: int = 0, **options: object) -> TorchFullyShardedDataParallel:
    return TorchFullyShardedDataParallel(Model(seed), fsdp_unit_modules=[Outer], **options)


def _trains_as_a_plain_model(rank: int, world_size: int) -> None:
    plain = Model(0)
    module = Model(seed=rank)  # rank 0's values count
    module.layers[0].inner.weight.tensor_model_parallel = "mine"
    module.last.bias.sequence_parallel = True
    model = TorchFullyShardedDataParallel(module, fsdp_unit_modules=["Outer"])
    assert model.module is module
    assert [name for name, part in module.named_modules() if isinstance(part, FSDPModule)] == [
        "",
        *(f"layers.{number}{inner}" for number in range(2) for inner in ("", ".inner")),
    ]
    assert int(module.count) == 0
    assert module.repeated.tolist() == [1.0] * 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        for microbatch in range(2):
            with contextlib.nullcontext() if microbatch else model.no_sync():
                _loss(model, _data(10 * step + microbatch, rank)).backward()
            for other in range(world_size):
                (_loss(plain, _data(10 * step + microbatch, other)) / world_size).backward()
        model.start_grad_sync()
        model.finish_grad_sync()
        model.scale_gradients(0.5)
        model.scale_gradients(torch.tensor([0.5]))
        for param in plain.parameters():
            param.grad *= 0.25
        _close(_grads(model), _grads(plain))
        for one in (optimizer, plain_optimizer):
            one.step()
        with torch.no_grad():  # leaves the root's parameters gathered
            model(_data(0, 0))
        model.zero_grad_buffer()
        plain_optimizer.zero_grad()
    _close([*ss.full_state_dict(model).values()], [*plain.state_dict().values()])
    # Attributes: on the sharded parameters, and on those that a forward sees.
    assert module.last.bias.sequence_parallel is True
    assert module.layers[0].inner.weight.tensor_model_parallel == "mine"
    assert set(module.layers[0].inner.seen) == {"mine"}
    assert set(module.layers[1].inner.seen) == {None}


def test_trains_as_a_plain_model_with_nested_units_microbatches_and_attributes() -> None:
    run_on_ranks(_trains_as_a_plain_model, 2)


def _owed(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = _adapter(config=TorchFullyShardedDataParallelConfig(mp_policy=policy))
    _loss(model, _data(1, rank)).backward()
    expected = _grads(model)
    model.zero_grad_buffer()
    with pytest.raises(KeyError), model.no_sync():
        with model.no_sync():
            _loss(model, _data(0, rank)).backward()
        _loss(model, _data(0, rank)).backward()
        assert all(param.grad is None for param in model.parameters())
        raise KeyError
    for refused in (model.finish_grad_sync, lambda: model.scale_gradients(2.0)):
        with pytest.raises(RuntimeError, match=r"got those of .*weight.*only added under no_sync"):
            refused()
    model.zero_grad_buffer()
    model.finish_grad_sync()
    # What was owed has gone, and backwards exchange again.
    _loss(model, _data(1, rank)).backward()
    model.finish_grad_sync()
    for got, wanted in zip(_grads(model), expected, strict=True):
        assert torch.equal(got, wanted)
    _evaluated(rank)
    # By the tokens of all ranks, which have other numbers of them; averages would be halved.
    with pytest.raises(ValueError, match=r"num_tokens: expected None .* calculate_per_token_loss"):
        ss.finalize_model_grads(model, 3)
    config = TorchFullyShardedDataParallelConfig(mp_policy=policy, calculate_per_token_loss=True)
    summed = _adapter(config=config)
    _loss(summed, _data(1, rank)).backward()
    ss.finalize_model_grads(summed, torch.tensor(3 + rank))
    for got, wanted in zip(_grads(summed), expected, strict=True):
        torch.testing.assert_close(got, wanted * (world_size / 7))


def _evaluated(rank: int) -> None:
    """A forward without gradients leaves gathered parameters, which have none, in their place."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    module = Model()
    module.last.weight.sequence_parallel = True
    config = TorchFullyShardedDataParallelConfig(reshard_after_forward=False)
    model = TorchFullyShardedDataParallel(module, config, mesh=mesh["dp"])

    def evaluate() -> None:
        with torch.no_grad():
            model(_data(0, 0))
        assert not isinstance(module.last.weight, DTensor)

    _loss(model, _data(1, rank)).backward()
    total = module.last.weight.grad.full_tensor()
    torch.distributed.all_reduce(total)
    evaluate()
    ss.finalize_model_grads(model, None, ss.ProcessGroupCollection(tp=mesh["tp"].get_group()))
    torch.testing.assert_close(module.last.weight.grad.full_tensor(), total)
    evaluate()
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_no_backward_exchanged_are_refused_and_can_be_dropped(
    dtype: torch.dtype | None,
) -> None:
    run_on_ranks(_owed, 2, dtype)


def _loads(rank: int, world_size: int, folder: str) -> None:
    model, plain = _adapter(), Model(1)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(model.state_dict_for_save_checkpoint()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    _same(model, plain)
    # Of another sharding, as FSDP2 and as ours; of the same one.
    groups = ss.initialize_model_parallel(num_distributed_optimizer_instances=2)
    replicated = _adapter(2, process_groups=groups)
    ours, _ = ss.fully_shard(Model(3), None)
    for other in (replicated, ours, _adapter(4)):
        model.load_state_dict(other.state_dict())
        _same(model, other)
    with torch.no_grad():
        model(_data(0, 0))
    model.load_state_dict(plain.state_dict())
    _same(model, plain)
    # Each replica as the first.
    with torch.no_grad():
        for param in replicated.parameters():
            param.to_local().add_(rank)
    replicated.broadcast_params()
    _same(replicated, Model(2))
    with pytest.raises(RuntimeError, match=r"size mismatch for first.weight"):
        model.load_state_dict({**plain.state_dict(), "first.weight": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match=r"Missing key.*count"):
        model.load_state_dict({"first.weight": plain.first.weight.detach()})
    assert model.load_state_dict({"x": plain.first.weight}, strict=False).unexpected_keys == ["x"]
    with pytest.raises(RuntimeError, match="leave assign out"):
        model.load_state_dict(plain.state_dict(), assign=True)
    _in_a_list(rank)
    marked = Model()
    marked.last.bias.allreduce = False
    with pytest.raises(ValueError, match=r"'last.bias' is an expert's .* or use DistributedDataPa"):
        TorchFullyShardedDataParallel(marked)
    _checkpoints(rank, model, folder)


def _in_a_list(rank: int) -> None:
    """Several, with one optimizer over all."""
    config = TorchFullyShardedDataParallelConfig(reshard_after_forward=False)
    lists = [nn.ModuleList(_adapter(seed + n, config=config) for n in (0, 1)) for seed in (0, 5)]
    with torch.no_grad():  # leaves parameters gathered, which no optimizer may get
        for chunk in lists[0]:
            chunk(_data(0, 0))
    optimizers = [torch.optim.AdamW(held.parameters(), lr=0.1) for held in lists]
    for chunk in lists[0]:
        _loss(chunk, _data(0, rank)).backward()
    optimizers[0].step()
    whole = tools.StateDictOptions(full_state_dict=True)
    found = tools.get_state_dict(lists[0], optimizers[0], options=whole)
    names = [name for name, _ in nn.ModuleList(Model() for _ in range(2)).named_parameters()]
    assert list(found[1]["state"]) == names
    tools.set_state_dict(
        lists[1],
        optimizers[1],
        model_state_dict=found[0],
        optim_state_dict=copy.deepcopy(found[1]),  # else both would have the same tensors
        options=whole,
    )
    for held, optimizer in zip(lists, optimizers, strict=True):
        optimizer.zero_grad()
        for chunk in held:
            _loss(chunk, _data(1, rank)).backward()
        optimizer.step()
    _same(*lists)


def _same(model: nn.Module, other: nn.Module) -> None:
    states = ss.full_state_dict(model), ss.full_state_dict(other)
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def _checkpoints(rank: int, model: nn.Module, folder: str) -> None:
    """Saved by FSDP2, and trained on by it, by ours and in one piece."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _loss(model, _data(7, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def adamw(model: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr)

    plain = Model(5)
    model.load_state_dict(plain.state_dict())
    optimizer, whole = adamw(model, 1e-2), adamw(plain, 1e-2)
    for one in ((model, optimizer), (plain, whole)):
        step(*one)
    ss.save_checkpoint(f"{folder}/c", model, optimizer, extra=("step", 1))
    again, ours = _adapter(6), Model(6)
    ours, bound = ss.fully_shard(ours, adamw(ours))
    again_optimizer = adamw(again)
    for one in ((again, again_optimizer), (ours, bound)):
        assert ss.load_checkpoint(f"{folder}/c", *one) == ("step", 1)
    for one in ((again, again_optimizer), (ours, bound), (plain, whole)):
        step(*one)
    for got in (again, ours):
        expected = plain.state_dict()
        _close([*ss.full_state_dict(got).values()], [expected[name] for name in got.state_dict()])
    with pytest.raises(ValueError, match="other parameters"):
        ss.save_checkpoint(f"{folder}/c", again, adamw(copy.deepcopy(plain)))


def test_loads_state_dicts_and_checkpoints_whichever_way_they_were_sharded(tmp_path: Path) -> None:
    run_on_ranks(_loads, 2, str(tmp_path))


def _refuses(rank: int, world_size: int) -> None:
    groups = ProcessGroupCollection(dp_cp=torch.distributed.group.WORLD)
    tied = Model()
    tied.layers[1].inner.weight = tied.layers[0].inner.weight
    before = dict(tied.named_parameters(remove_duplicate=False))
    with pytest.raises(ValueError, match=r"layers.0.inner.weight', 'layers.1.inner.weight'.*leave"):
        TorchFullyShardedDataParallel(tied, fsdp_unit_modules=[Inner])
    assert dict(tied.named_parameters(remove_duplicate=False)) == before
    shared, named = Model(), Model()
    shared.layers[1].norm = shared.layers[0].norm
    named.norm = named.layers[0].norm  # FSDP2 does not gather it for the root
    for model, names in ((shared, "layers.0.norm.weight', 'layers.1.norm"), (named, "norm.weight")):
        with pytest.raises(ValueError, match=f"{names}.*leave out the class"):
            TorchFullyShardedDataParallel(model, fsdp_unit_modules=[Outer])
    odd = Model()
    odd.scale = nn.Parameter(torch.tensor(1.0))
    odd.layers[0].nothing = nn.Parameter(torch.zeros(0, 2))
    odd.last.weight = nn.Parameter(torch.randn(5, 7).t())
    odd.frozen = nn.Parameter(torch.zeros(0), requires_grad=False)
    before = dict(odd.named_parameters())
    with pytest.raises(
        ValueError,
        match=r"got others: 'scale' has no .* 'layers.0.nothing' is .* 'last.weight' is not cont",
    ) as caught:
        TorchFullyShardedDataParallel(odd, fsdp_unit_modules=[Outer])
    assert "frozen" not in str(caught.value)
    for options, words in (
        ({"config": {"reshard_after_forward": False}}, "config: expected a Torch.* got dict"),
        (
            {"config": TorchFullyShardedDataParallelConfig(mp_policy=ss.MixedPrecisionPolicy())},
            "mp_policy: expected a MixedPrecisionPolicy of torch, got .* of sidestream",
        ),
        ({"mesh": torch.distributed.group.WORLD}, "mesh: expected a DeviceMesh .* ProcessGroup"),
    ):
        with pytest.raises(TypeError, match=words):
            TorchFullyShardedDataParallel(odd, **options)
    assert all(param is before[name] for name, param in odd.named_parameters())
    for factor, kind in ((torch.ones(3), ValueError), ("2", TypeError)):
        with pytest.raises(kind, match="factor: expected a number"):
            _adapter().scale_gradients(factor)
    with pytest.raises(ValueError, match="model with a forward"):
        TorchFullyShardedDataParallel(Model(), fsdp_unit_modules=[nn.ModuleList])
    with pytest.raises(ValueError, match="match no module"):
        TorchFullyShardedDataParallel(Model(), fsdp_unit_modules=["Nope"])
    with pytest.raises(ValueError, match="sharded already"):
        TorchFullyShardedDataParallel(ss.fully_shard(Model(), None)[0])
    with pytest.raises(
        TypeError, match="expected a TorchFullyShardedDataParallelConfig of sidestream, got dict"
    ):
        TorchFullyShardedDataParallel(Model(), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got both"):
        _adapter(process_groups=groups, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="sharded already"):
        TorchFullyShardedDataParallel(_adapter(process_groups=groups).module)


def test_refuses_what_cannot_be_sharded_before_anything_changes() -> None:
    run_on_ranks(_refuses, 1)
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group"):
        TorchFullyShardedDataParallel(Model())
