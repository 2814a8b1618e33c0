"""Methods other than forward as entries of a sharded model."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins

SHAPE = (4, 6)
BF16 = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))

    def apply_other(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.other(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def encode(self, x: Tensor, *, times: int = 1) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale) * times
        return x

    def decode(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x)}

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))["logits"]

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = torch.cat([x[:, 3:], self(x)], 1) * self.scale
        return x

    def fail(self, x: Tensor, error: type[BaseException]) -> Tensor:
        self.encode(x)
        raise error("in the middle")

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.encode(x)

    @staticmethod
    def double(x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def name_and(cls, x: Tensor) -> tuple[str, Tensor]:
        return cls.__name__, x


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _twins(rank: int, world_size: int, zero: int, **options: object) -> Twins:
    twins = Twins(rank, world_size, _model(), zero, [_Block], **options)
    for name in ("encode", "decode", "generate", "fail"):
        ss.register_forward_method(twins.sharded, name)
    for block in twins.sharded.blocks:
        ss.register_forward_method(block, "apply_other")
    return twins


def _encode(model: _Model, x: Tensor) -> Tensor:
    return model.encode(x, times=2).square().mean()


def _encode_and_decode(model: _Model, x: Tensor) -> Tensor:
    return model.decode(model.encode(x))["logits"].square().mean()


def _through_forward(model: _Model, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _generate(model: _Model, x: Tensor) -> Tensor:
    return model.generate(x, 3).square().mean()


def _unit_method(model: _Model, x: Tensor) -> Tensor:
    return model.blocks[1].apply_other(model.blocks[0](x)).square().mean()


def _checkpointed(model: _Model, x: Tensor) -> Tensor:
    x = checkpoint(model.blocks[0].apply_other, x, use_reentrant=False)
    return checkpoint(model.encode, x, use_reentrant=False).square().mean()


LOSSES = {
    "one method": _encode,
    "two methods": _encode_and_decode,
    "methods called by forward": _through_forward,
    "a method that calls forward": _generate,
    "a unit's method": _unit_method,
    "checkpointed methods": _checkpointed,
}


def _trained(rank: int, world_size: int, loss: Callable[[_Model, Tensor], Tensor]) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        twins.train(loss, SHAPE)
        twins.train(_through_forward, SHAPE, steps=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_training_through_registered_methods(
    loss: Callable[[_Model, Tensor], Tensor], world_size: int
) -> None:
    run_on_ranks(_trained, world_size, loss)


def _evaluated(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = _twins(rank, world_size, zero)
        x = torch.ones(SHAPE)
        runtime = runtime_of(twins.sharded)
        at_rest = runtime.pool.live_bytes
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(twins.sharded.generate(x, 4), twins.plain.generate(x, 4))
                twins.check_at_rest()
                assert runtime.pool.live_bytes == at_rest


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_generation_through_a_method_frees_its_memory(world_size: int) -> None:
    run_on_ranks(_evaluated, world_size)


def _failed(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        for error in (ValueError, KeyboardInterrupt):
            twins = _twins(rank, world_size, zero)
            with pytest.raises(error, match="in the middle"):
                twins.sharded.fail(torch.ones(SHAPE), error)
            for param in twins.sharded.parameters():
                assert isinstance(param, ss.ShardedTensor)
            twins.train(_encode_and_decode, SHAPE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_an_exception_in_a_method_training_goes_on(world_size: int) -> None:
    run_on_ranks(_failed, world_size)


def _cast(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = _model()
        ss.fully_shard(
            model, zero_dp_strategy=zero, fsdp_unit_modules=[_Block], mixed_precision_policy=BF16
        )
        ss.register_forward_method(model, "decode")
        ss.register_forward_method(model.blocks[0], "apply_other")
        out = model.decode(torch.ones(SHAPE))["logits"]
        assert out.dtype == torch.float32
        plain = _model().head.bfloat16()
        assert torch.equal(out, plain(torch.ones(SHAPE).bfloat16()).float())
        assert model.blocks[0].apply_other(torch.ones(SHAPE)).dtype == torch.bfloat16


@pytest.mark.parametrize("world_size", [1, 2])
def test_inputs_and_outputs_are_cast_as_those_of_forward(world_size: int) -> None:
    run_on_ranks(_cast, world_size)


def test_registering_twice_changes_nothing_and_names_stay() -> None:
    model = _model()
    ss.fully_shard(model, fsdp_unit_modules=[_Block])
    ss.register_forward_method(model, "encode")
    method = model.encode
    ss.register_forward_method(model, "encode")
    assert model.encode is method
    assert method.__name__ == "encode"
    ss.register_forward_method(model, "double")
    assert torch.equal(model.double(torch.ones(2)), torch.full((2,), 2.0))
    ss.register_forward_method(model, "name_and")
    assert model.name_and(torch.ones(2))[0] == "_Model"
    assert "encode" not in model.state_dict()


def test_a_registered_model_is_freed_without_the_garbage_collector() -> None:
    model = _model()
    ss.fully_shard(model, fsdp_unit_modules=[_Block])
    ss.register_forward_method(model, "encode")
    model.encode(torch.ones(SHAPE)).sum().backward()
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


WRONG_NAMES = {
    "unknown": ("generate_step", "expected a method of _Model, got 'generate_step'"),
    "submodule": ("head", "expected a method of _Model, got 'head'"),
    "parameter": ("scale", "expected a method of _Model, got 'scale'"),
    "forward": ("forward", "write module"),
    "generator": ("stream", "runs after the call"),
}


@pytest.mark.parametrize(("name", "text"), WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_names_that_are_no_entry_are_refused(name: str, text: str) -> None:
    model = _model()
    ss.fully_shard(model, fsdp_unit_modules=[_Block])
    with pytest.raises(ValueError, match=text):
        ss.register_forward_method(model, name)
    assert name not in vars(model)


def test_modules_that_are_no_unit_are_refused_with_the_unit_s_name() -> None:
    model = _model()
    ss.fully_shard(model, fsdp_unit_modules=[_Block])
    with pytest.raises(
        ValueError, match=r"Linear that is neither; .*owns its parameters: blocks.1"
    ):
        ss.register_forward_method(model.blocks[1].inner, "extra_repr")
    with pytest.raises(ValueError, match=r"Linear that is neither; .*: \(root\)"):
        ss.register_forward_method(model.head, "extra_repr")
    with pytest.raises(ValueError, match=r"Linear that is neither; shard it first"):
        ss.register_forward_method(nn.Linear(2, 2), "extra_repr")
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module"):
        ss.register_forward_method("model", "encode")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected the name of a method"):
        ss.register_forward_method(model, model.encode)  # type: ignore[arg-type]
