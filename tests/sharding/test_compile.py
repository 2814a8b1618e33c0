"""`torch.compile` of a sharded model's blocks and of the whole model, against the same without."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import preload, run_on_ranks

# What the first compilation imports: seconds of each rank's time.
preload("torch._dynamo.backends.debugging", "torch._dynamo.convert_frame", "functorch.compile")
preload("torch._inductor.compile_fx")

pytestmark = pytest.mark.slow

ZEROS = (0, 1, 2, 3)
STEPS = 2
# Compilers take long where other work shares the cores.
TIMEOUT_S = 110
BLOCKS = 2
BEFORE_AND_AFTER = (True, False)
"""Whether the compiler comes before `fully_shard`."""
ORDERS = {0: (True,), 1: (False,), 2: (True,), 3: BEFORE_AND_AFTER}
"""Which of these are tried at a ZeRO level. What is compiled does not depend on the level."""


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.checkpointed = checkpointed

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


class Model(nn.Module):
    """Its blocks are called one by one: dynamo leaves out a frame that breaks inside a loop."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.first = Block(checkpointed=checkpointed)
        self.second = Block(checkpointed=checkpointed)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.relu(self.embed(x)))
        return self.head(self.second(torch.sin(x)))


def _compile_blocks(model: nn.Module, backend: str) -> nn.Module:
    for block in model.children():
        if isinstance(block, Block):
            block.compile(backend=backend)
    return model


def _wrap_blocks(model: nn.Module, backend: str) -> nn.Module:
    for name, block in model.named_children():
        if isinstance(block, Block):
            setattr(model, name, torch.compile(block, backend=backend))
    return model


def _compile_model(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def _wrap_model(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "block.compile()": _compile_blocks,
    "torch.compile(block)": _wrap_blocks,
    "model.compile()": _compile_model,
    "torch.compile(model)": _wrap_model,
}


def _shard(model: nn.Module, zero: int, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ss.fully_shard(model, optimizer, zero_dp_strategy=zero, fsdp_unit_modules=[Block], **options)
    return optimizer


def _compiled(
    plain: nn.Module, zero: int, way: str, *, before: bool, backend: str, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy of `plain`, compiled and sharded, with nothing left of what was compiled earlier."""
    torch._dynamo.reset()
    counters.clear()
    model = copy.deepcopy(plain)
    if before:
        model = WAYS[way](model, backend)
    optimizer = _shard(model, zero, **options)
    return model if before else WAYS[way](model, backend), optimizer


def _plain(*, checkpointed: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(checkpointed=checkpointed)


def _data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> list[Tensor]:
    """One with a microbatch under no_sync. Returns the loss, the norm, all gradients."""
    with ss.no_sync(model):
        model(_data(rank, 100 + step)).square().mean().backward()
    loss = model(_data(rank, step)).square().mean()
    loss.backward()
    seen = [loss.detach(), ss.clip_grad_norm_(model, 0.5)]
    seen += [param.grad.full_tensor() for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return seen


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[Tensor]:
    """What `_step` returns, step by step, and then the parameters. Compiles in the first alone."""
    seen = _step(model, optimizer, rank, 0)
    frames = counters["frames"]["total"]
    for step in range(1, STEPS):
        seen += _step(model, optimizer, rank, step)
    assert counters["frames"]["total"] == frames, "compiled anew after the first step"
    return seen + [param.full_tensor() for param in model.parameters()]


def _graphs_and_breaks() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def _same_bits(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


# What a way makes of the model: one graph for all blocks, and the model's own forward in the parts
# before, between and behind them, which end where a block's hooks are called.
GRAPHS_AND_BREAKS = {
    "block.compile()": (1, 0),
    "torch.compile(block)": (1, 0),
    "model.compile()": (1 + BLOCKS + 1, BLOCKS),
    "torch.compile(model)": (1 + BLOCKS + 1, BLOCKS),
}


def _check_ways(rank: int, world_size: int, backend: str, ways: list[str], zeros: Any) -> None:
    plain = _plain()
    for zero in zeros:
        uncompiled = copy.deepcopy(plain)
        expected = _train(uncompiled, _shard(uncompiled, zero), rank)
        for way in ways:
            for before in ORDERS[zero]:
                case = f"{way} {'before' if before else 'after'} fully_shard at ZeRO-{zero}"
                made = _compiled(plain, zero, way, before=before, backend=backend)
                assert _same_bits(_train(*made, rank), expected), case
                assert _graphs_and_breaks() == GRAPHS_AND_BREAKS[way], case


@pytest.mark.parametrize(
    ("world_size", "backend", "ways", "zeros"),
    [
        pytest.param(1, "eager", ["block.compile()", "torch.compile(model)"], (0, 3), id="world1"),
        pytest.param(2, "aot_eager", ["block.compile()"], ZEROS, id="block-method"),
        pytest.param(2, "aot_eager", ["torch.compile(block)"], ZEROS, id="block-wrapped"),
        pytest.param(2, "aot_eager", ["model.compile()"], (1, 3), id="model-method"),
        pytest.param(2, "aot_eager", ["torch.compile(model)"], (0, 3), id="model-wrapped"),
        pytest.param(3, "eager", ["block.compile()"], ZEROS, id="world3"),
    ],
)
def test_compiled_blocks_and_models_train_the_same_bits_and_compile_once(
    world_size, backend, ways, zeros
):
    run_on_ranks(_check_ways, world_size, backend, ways, zeros, timeout_s=TIMEOUT_S)


WAYS_AT = {1: ("block.compile()",), 3: ("block.compile()", "torch.compile(model)")}
POLICY = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def _check_bf16_and_checkpoints(rank: int, world_size: int) -> None:
    plain = _plain(checkpointed=True)
    options = {"mixed_precision_policy": POLICY}
    for zero in (1, 3):
        uncompiled = copy.deepcopy(plain)
        expected = _train(uncompiled, _shard(uncompiled, zero, **options), rank)
        for way in WAYS_AT[zero]:
            made = _compiled(plain, zero, way, before=False, backend="aot_eager", **options)
            assert _same_bits(_train(*made, rank), expected), (zero, way)
            assert _graphs_and_breaks() == GRAPHS_AND_BREAKS[way], (zero, way)


def test_mixed_precision_and_checkpoints_inside_compiled_blocks_keep_their_bits():
    run_on_ranks(_check_bf16_and_checkpoints, 2, timeout_s=TIMEOUT_S)


def _check_memory(rank: int, world_size: int) -> None:
    model, _ = _compiled(_plain(), 3, "block.compile()", before=False, backend="aot_eager")
    blocks = [unit for unit in runtime_of(model).units if unit.spec.name != "(root)"]
    for step in range(2):
        loss = model(_data(rank, step)).square().mean()
        assert [unit.faces.full[0].untyped_storage().nbytes() for unit in blocks] == [0] * BLOCKS
        loss.backward()


def test_weights_of_compiled_blocks_are_free_between_forward_and_backward():
    run_on_ranks(_check_memory, 2)


def _check_evaluation(rank: int, world_size: int) -> None:
    plain = _plain()
    for zero in (0, 3):
        uncompiled = copy.deepcopy(plain)
        _shard(uncompiled, zero)
        with torch.no_grad():
            expected = uncompiled(_data(rank, 0))
        model, optimizer = _compiled(plain, zero, "block.compile()", before=True, backend="eager")
        graphs = []
        for _ in range(2):
            model.train()
            model(_data(rank, 0)).sum().backward()
            optimizer.zero_grad()
            graphs.append(_graphs_and_breaks()[0])
            model.eval()
            for grad_mode in (torch.no_grad, torch.enable_grad):
                with grad_mode():
                    assert torch.equal(model(_data(rank, 0)), expected), zero
                graphs.append(_graphs_and_breaks()[0])
        # Training and evaluation, with and without gradients.
        assert graphs[3:] == [graphs[2]] * 3 and graphs[2] <= 3, graphs


def test_evaluation_compiles_once_more_and_training_goes_on_as_before():
    run_on_ranks(_check_evaluation, 2)


def _check_errors(rank: int, world_size: int) -> None:
    plain = _plain()
    for zero in (1, 3):
        uncompiled = copy.deepcopy(plain)
        expected = _train(uncompiled, _shard(uncompiled, zero), rank)
        for way in WAYS_AT[zero]:
            model, optimizer = _compiled(plain, zero, way, before=False, backend="aot_eager")
            wrong = model.first.up.register_forward_pre_hook(lambda _module, args: args[0][:, :5])
            with pytest.raises(RuntimeError, match=r"(?i)shape|size"):
                model(_data(rank, 0))
            wrong.remove()
            optimizer.zero_grad()
            assert _same_bits(_train(model, optimizer, rank), expected), (zero, way)


def test_after_an_error_in_a_compiled_block_training_goes_on():
    run_on_ranks(_check_errors, 2, timeout_s=TIMEOUT_S)


def _plain_sgd(compiled: bool) -> Tensor:
    """A parameter after two steps of torch's SGD."""
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(values[0].clone())
    param.grad = values[1].clone()
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    for _ in range(2):
        step()
    return param.detach()


def _check_whole_step(rank: int, world_size: int) -> None:
    plain = _plain()
    uncompiled = copy.deepcopy(plain)
    expected = _train(uncompiled, _shard(uncompiled, 3), rank)
    model = copy.deepcopy(plain)
    optimizer = _shard(model, 3)
    if not torch.equal(_plain_sgd(compiled=True), _plain_sgd(compiled=False)):
        # torch 2.11 compiles a plain optimizer's step too to one that rounds otherwise.
        optimizer.step = torch.compiler.disable(optimizer.step)
    step = torch.compile(_step, backend="aot_eager")
    got = [seen for number in range(STEPS) for seen in step(model, optimizer, rank, number)]
    got += [param.full_tensor() for param in model.parameters()]
    assert _same_bits(got, expected)


def test_a_compiled_function_of_a_whole_step_trains_the_same_bits():
    run_on_ranks(_check_whole_step, 2, timeout_s=TIMEOUT_S)


def _check_checkpoints(rank: int, world_size: int, folder: str) -> None:
    plain = _plain()
    uncompiled = copy.deepcopy(plain)
    optimizer = _shard(uncompiled, 3)
    _train(uncompiled, optimizer, rank)
    trained = [param.full_tensor() for param in uncompiled.parameters()]
    ss.save_checkpoint(f"{folder}/uncompiled", uncompiled, optimizer)
    expected = _step(uncompiled, optimizer, rank, 7)
    for way in WAYS:
        # A method leaves no wrapper, whose name could come into the checkpoint.
        for before in BEFORE_AND_AFTER if way.startswith("torch.compile") else (True,):
            path = f"{folder}/{way} {before}"
            model, optimizer = _compiled(plain, 3, way, before=before, backend="eager")
            ss.load_checkpoint(f"{folder}/uncompiled", model, optimizer)
            ss.save_checkpoint(path, model, optimizer)
            assert _same_bits(_step(model, optimizer, rank, 7), expected), path
            restored = copy.deepcopy(plain)
            optimizer = _shard(restored, 0)
            ss.load_checkpoint(path, restored, optimizer)
            assert _same_bits([param.full_tensor() for param in restored.parameters()], trained)
            assert _same_bits(_step(restored, optimizer, rank, 7), expected), path


def test_checkpoints_are_the_same_with_and_without_the_compiler(tmp_path: Path):
    run_on_ranks(_check_checkpoints, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def _check_inductor(rank: int, world_size: int) -> None:
    plain = _plain()
    uncompiled = copy.deepcopy(plain)
    expected = _train(uncompiled, _shard(uncompiled, 3), rank)
    for way in ("block.compile()", "torch.compile(model)"):
        made = _compiled(plain, 3, way, before=False, backend="inductor")
        # Fused kernels add up to 16 products, through 4 layers and back, in an order of their own,
        # in every step.
        eps = 8 * 16 * STEPS * torch.finfo(torch.float32).eps
        for got, wanted in zip(_train(*made, rank), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=eps, atol=eps)
        assert _graphs_and_breaks() == GRAPHS_AND_BREAKS[way], way


@pytest.mark.slow
def test_inductor_trains_the_same_up_to_rounding():
    run_on_ranks(_check_inductor, 2, timeout_s=TIMEOUT_S)
