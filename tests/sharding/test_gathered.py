"""Inside `gathered` the parameters of a sharded model are whole, and what is written counts."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import RanksFailed, run_on_ranks
from sidestream.tests.sharding.twins import LEVELS, Twins, square_loss

BF16 = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Model(nn.Module):
    """Tied weights, a frozen and a half-precision parameter, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((6,), 2.0), requires_grad=False)
        self.bias16 = nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale + self.bias16.float().sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _pair(zero: int, **options: object) -> tuple[_Model, _Model]:
    """A plain model and a sharded one of the same values."""
    model = _model()
    plain = copy.deepcopy(model)
    ss.fully_shard_model(model, zero_dp_strategy=zero, fsdp_unit_modules=[_Block], **options)
    return plain, model


def _tokens() -> Tensor:
    return torch.arange(7)[None]


def _equal(model: nn.Module, plain: nn.Module) -> None:
    """The sharded parameters and what forward makes of them are the plain model's."""
    with torch.no_grad():
        for (name, value), expected in zip(
            ss.full_state_dict(model).items(), plain.state_dict().values(), strict=True
        ):
            assert torch.equal(value.to(expected.dtype), expected), name
        assert torch.equal(model(_tokens()), plain(_tokens()))


def _at_rest(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, ss.ShardedTensor), name


@contextlib.contextmanager
def _refused(*texts: str) -> Iterator[None]:
    with pytest.raises(RuntimeError) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def _read(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        plain, model = _pair(zero)
        expected = dict(plain.named_parameters())
        pool = runtime_of(model).pool
        at_rest = pool.live_bytes
        for part, unit in ((model, ""), (model.blocks[1].up, "blocks.1."), (model.head, "e")):
            with ss.gathered(part):
                assert all(type(param) is nn.Parameter for param in part.parameters())
                for name, param in model.named_parameters():
                    if name.startswith(unit):
                        assert type(param) is nn.Parameter, name
                        assert torch.equal(param, expected[name].to(param.dtype)), name
                        assert param.requires_grad == expected[name].requires_grad, name
                assert isinstance(model.blocks[0].up.weight, ss.ShardedTensor) == (unit != "")
                assert model.head.weight is model.embedding.weight
                memory = weakref.ref(next(iter(part.parameters())))
                del param
            assert memory() is None, "somebody still holds a whole parameter"
            assert pool.live_bytes == at_rest
            _at_rest(model)
        _equal(model, plain)


@worlds
def test_parameters_are_whole_inside_and_their_memory_is_freed_after(world_size: int) -> None:
    run_on_ranks(_read, world_size)


def test_marks_on_parameters_are_there_inside() -> None:
    model = nn.Linear(3, 2)
    model.weight.no_decay = True  # type: ignore[attr-defined]
    ss.fully_shard(model)
    with ss.gathered(model):
        assert model.weight.no_decay and not hasattr(model.bias, "no_decay")


def test_an_error_names_some_of_many() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    ss.fully_shard(model)
    with _refused("'0.weight' was written to", "and 4 more"), ss.gathered(model), torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)


def _fill(model: _Model) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(0.5)
        model.embedding.weight[2:4] = 1.5


def _initialise(model: _Model) -> None:
    torch.manual_seed(7)
    for block in model.blocks:
        nn.init.normal_(block.up.weight)
        nn.init.zeros_(block.down.bias)


def _rebind(model: _Model) -> None:
    model.blocks[1].down.weight.data = torch.linspace(0, 1, 60).view(10, 6).t()
    model.bias16.data = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)


def _transpose_in_place(model: _Model) -> None:
    square = model.blocks[0].up.weight.data[:6]
    square.copy_(square.t().clone())


def _merge(model: _Model) -> None:
    """As adapters are merged into their base layer."""
    generator = torch.Generator().manual_seed(3)
    down, up = torch.randn(2, 6, generator=generator), torch.randn(10, 2, generator=generator)
    model.blocks[1].up.weight.data += (up @ down) * 0.25


def _load(model: _Model) -> None:
    model.blocks[0].load_state_dict({k: v + 1 for k, v in model.blocks[0].state_dict().items()})


WRITES: dict[str, Callable[[_Model], None]] = {
    "in place": _fill,
    "initialisers": _initialise,
    "assigned data": _rebind,
    "data in place": _transpose_in_place,
    "merged adapter": _merge,
    "load_state_dict": _load,
}


def _written(rank: int, world_size: int, change: Callable[[_Model], None]) -> None:
    for zero in LEVELS[world_size]:
        plain, model = _pair(zero)
        _equal(model, plain)
        change(plain)
        with ss.gathered(model, write=True):
            change(model)
            inside = model(_tokens())
        assert torch.equal(inside, plain(_tokens()))
        _at_rest(model)
        _equal(model, plain)


@worlds
@pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
def test_what_is_written_counts_in_forward_inside_and_after(
    change: Callable[[_Model], None], world_size: int
) -> None:
    run_on_ranks(_written, world_size, change)


def _refused_writes(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        for change, name in (
            (_fill, "'blocks.0.up.weight' was written to"),
            (_rebind, "'blocks.1.down.weight' was written to"),
            (_merge, "'blocks.1.up.weight' was written to"),
        ):
            plain, model = _pair(zero)
            with _refused(name, "write=True"), ss.gathered(model):
                change(model)
            _at_rest(model)
            _equal(model, plain)
        plain, model = _pair(zero)
        with _refused("'embedding.weight' was written to"), ss.gathered(model.head):
            if rank == world_size - 1:
                # On one rank, in what perhaps another one holds.
                model.embedding.weight.data[0, 0] += 1
        _equal(model, plain)


@worlds
def test_write_without_write_true_is_refused_by_name_and_nothing_changes(world_size: int) -> None:
    run_on_ranks(_refused_writes, world_size)


def _unequal(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        plain, model = _pair(zero)
        with (
            _refused("'blocks.0.up.weight'", "'blocks.0.down.weight' was given other values"),
            ss.gathered(model, write=True),
        ):
            torch.manual_seed(rank)
            nn.init.normal_(model.blocks[0].up.weight)
            if rank == 0:
                nn.init.zeros_(model.blocks[0].down.weight)
        _at_rest(model)
        _equal(model, plain)


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_values_on_some_ranks_are_refused_by_name_and_nothing_changes(
    world_size: int,
) -> None:
    run_on_ranks(_unequal, world_size)


def _masters(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        plain, model = _pair(zero, mixed_precision_policy=BF16)
        with ss.gathered(model, write=True):
            weight = model.blocks[0].up.weight
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, plain.blocks[0].up.weight.bfloat16())
            with torch.no_grad():
                weight[1, 2] = 0.75
                weight[3] = -weight[3]
                model.blocks[1].up.bias[0] = float("nan")
        with torch.no_grad():
            expected = plain.blocks[0].up.weight
            expected[1, 2] = 0.75
            expected[3] = -expected[3].bfloat16().float()
            assert torch.equal(model.blocks[0].up.weight.full_tensor(), expected)
            assert model.blocks[1].up.bias.full_tensor().isnan().sum() == 1
            assert torch.equal(model.embedding.weight.full_tensor(), plain.embedding.weight)


@worlds
def test_masters_of_untouched_elements_keep_their_bits(world_size: int) -> None:
    run_on_ranks(_masters, world_size)


def _failing(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        for error in (ValueError, KeyboardInterrupt):
            plain, model = _pair(zero)
            with pytest.raises(error), ss.gathered(model, write=True):
                _fill(model)
                raise error("while writing")
            _at_rest(model)
            _equal(model, plain)
            with ss.gathered(model, write=True):
                _fill(model)
            _fill(plain)
            _equal(model, plain)


@worlds
def test_after_an_exception_inside_nothing_is_written(world_size: int) -> None:
    run_on_ranks(_failing, world_size)


def _misused(rank: int, world_size: int) -> None:
    folder = Path("nowhere")
    for zero in LEVELS[world_size]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = copy.deepcopy(model)
        ss.fully_shard(model, optimizer, zero_dp_strategy=zero, fsdp_unit_modules=[_Block])
        up = model.blocks[0].up
        with (
            _refused("'blocks.0.up.weight' was given data of another shape"),
            ss.gathered(up, write=True),
        ):
            up.weight.data = torch.zeros(2, 2)
        with (
            _refused("'blocks.0.up.weight' was given data of another shape or dtype"),
            ss.gathered(up, write=True),
        ):
            up.weight.data = up.weight.data.double()
        with _refused("'blocks.0.up.weight' was replaced"), ss.gathered(up, write=True):
            up.weight = nn.Parameter(torch.zeros(10, 6))
        with _refused("'blocks.0.up.weight' was given a gradient by hand"), ss.gathered(up):
            up.weight.grad = torch.zeros(10, 6)
        with _refused("optimizer.step: expected sharded", "leave the block"), ss.gathered(up):
            optimizer.step()
        with _refused("save_checkpoint", "leave the block"), ss.gathered(up):
            ss.save_checkpoint(folder, model)
        with (
            _refused("expected no backward inside gathered(write=True)"),
            ss.gathered(up, write=True),
        ):
            model(_tokens()).sum().backward()
        with (
            _refused("write=True in the block around"),
            ss.gathered(model),
            ss.gathered(up, write=True),
        ):
            pass
        with _refused("'blocks.0.up.weight' changed meanwhile"):
            sharded = up.weight
            with ss.gathered(up, write=True), torch.no_grad():
                sharded.add_(0.0)
        _at_rest(model)
        _equal(model, plain)
    wrong = [
        (ValueError, (nn.Linear(2, 2),), "part of one, got a Linear that is none"),
        (TypeError, (model, "yes"), "write: expected True or False"),
        (TypeError, (None,), "module: expected a torch.nn.Module"),
    ]
    for error, arguments, text in wrong:
        with pytest.raises(error, match=text), ss.gathered(*arguments):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_taken_over_is_refused_by_name(world_size: int) -> None:
    run_on_ranks(_misused, world_size)


def _nested(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        plain, model = _pair(zero)
        with ss.gathered(model, write=True):
            with ss.gathered(model.blocks[0]), torch.no_grad():
                assert type(model.blocks[0].up.weight) is nn.Parameter
                model.blocks[0].up.bias.fill_(3.0)
            with ss.gathered(model.blocks[1], write=True), torch.no_grad():
                model.blocks[1].up.bias.fill_(4.0)
            assert type(model.blocks[0].up.weight) is nn.Parameter
            state = model.state_dict()
            assert all(not isinstance(value, ss.ShardedTensor) for value in state.values())
        with ss.gathered(model.blocks):
            with ss.gathered(model):
                assert type(model.embedding.weight) is nn.Parameter
            assert isinstance(model.embedding.weight, ss.ShardedTensor)
            assert type(model.blocks[0].up.weight) is nn.Parameter
        with torch.no_grad():
            plain.blocks[0].up.bias.fill_(3.0)
            plain.blocks[1].up.bias.fill_(4.0)
        _equal(model, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_nest(world_size: int) -> None:
    run_on_ranks(_nested, world_size)


def _frozen_inside(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, nn.Sequential(_Block(), _Block()), zero, [_Block])
        with ss.gathered(twins.sharded[0]):
            twins.sharded[0].requires_grad_(False)
        twins.plain[0].requires_grad_(False)
        twins.train(square_loss, (3, 6), steps=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_frozen_inside_stay_frozen(world_size: int) -> None:
    run_on_ranks(_frozen_inside, world_size)


def _average(rank: int, world_size: int) -> None:
    """An average of the weights is swapped in, used and swapped out between two steps."""
    for zero in LEVELS[world_size]:
        twins = Twins(rank, world_size, nn.Sequential(_Block(), _Block()), zero, [_Block])
        average = [param.detach().clone() for param in twins.plain.parameters()]
        twins.train(square_loss, (3, 6), steps=1)
        x = torch.ones(2, 6)
        for model, block in ((twins.plain, contextlib.nullcontext), (twins.sharded, ss.gathered)):
            arguments = () if model is twins.plain else (model, True)
            with block(*arguments), torch.no_grad():
                kept = [param.clone() for param in model.parameters()]
                for param, value in zip(model.parameters(), average, strict=True):
                    param.copy_(value)
            model.averaged = model(x)
            with block(*arguments), torch.no_grad():
                for param, value in zip(model.parameters(), kept, strict=True):
                    param.copy_(value)
        torch.testing.assert_close(twins.sharded.averaged, twins.plain.averaged)
        twins.train(square_loss, (3, 6), steps=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_averaged_weights_can_be_swapped_in_and_out(world_size: int) -> None:
    run_on_ranks(_average, world_size)


def _generate(model: _Model, steps: int) -> Tensor:
    """By parts, without the model's own forward."""
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(steps):
        x = model.embedding(tokens) * model.scale
        for block in model.blocks:
            x = block(x)
        tokens = torch.cat([tokens, (x[:, -1] @ model.head.weight.t()).argmax(-1)[:, None]], 1)
    return tokens


def _by_parts(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        for mode in (torch.no_grad, torch.inference_mode):
            plain, model = _pair(zero)
            steps = 3 + rank  # ranks need not be in step: inside, nothing is gathered
            with mode():
                expected = _generate(plain, steps)
                with ss.gathered(model):
                    runtime_of(model).collectives.traffic.reset()
                    assert torch.equal(_generate(model, steps), expected)
                    assert not runtime_of(model).collectives.traffic.calls
                with ss.gathered(model, write=True):
                    model.scale.mul_(2.0)
            with torch.no_grad():
                plain.scale.mul_(2.0)
            _equal(model, plain)


@worlds
def test_generation_by_parts_gathers_once(world_size: int) -> None:
    run_on_ranks(_by_parts, world_size)


def _one_rank_alone(rank: int, world_size: int) -> None:
    _, model = _pair(3)
    if rank == 0:
        with ss.gathered(model):
            pass


def test_a_block_on_one_rank_alone_ends_in_an_error() -> None:
    with pytest.raises(RanksFailed, match="CommunicationError"):
        run_on_ranks(_one_rank_alone, 2, timeout_s=20)


def _recurrent(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LSTM(4, 3))
        plain = copy.deepcopy(model)
        ss.fully_shard(model, zero_dp_strategy=zero, fsdp_unit_modules=[nn.LSTM])
        x = torch.ones(2, 1, 4)
        with torch.no_grad():
            with ss.gathered(model, write=True):
                model[0].weight_ih_l0.mul_(2.0)
                inside, _ = model[0](x)
                lent = weakref.ref(model[0].weight_ih_l0)
            assert lent() is None
            plain[0].weight_ih_l0.mul_(2.0)
            assert torch.equal(inside, plain[0](x)[0])
            assert torch.equal(model(x)[0], plain(x)[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_recurrent_modules_let_go_of_whole_parameters(world_size: int) -> None:
    run_on_ranks(_recurrent, world_size)


class _Clamped(nn.Module):
    """Writes its own weight, and a part's, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.part = _Block()

    def forward(self, x: Tensor) -> Tensor:
        is_sharded = isinstance(self.part.up.bias, ss.ShardedTensor)
        block = ss.gathered(self, write=True) if is_sharded else contextlib.nullcontext()
        with block, torch.no_grad():
            # No name that looks like an assignment to `.data`.
            getattr(self.scale, "da" + "ta").clamp_(max=1.5)
            self.part.up.bias.add_(1.0)
        return self.part(x * self.scale)


def _inside_forward(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        torch.manual_seed(0)
        twins = Twins(rank, world_size, _Clamped(), zero, [_Block])
        for _ in range(2):
            with torch.no_grad():
                x = torch.ones(2, 6)
                assert torch.equal(twins.sharded(x), twins.plain(x))
        twins.check_params(rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_writes_inside_forward_count(world_size: int) -> None:
    run_on_ranks(_inside_forward, world_size)
