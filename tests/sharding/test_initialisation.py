"""A start from the meta device: the bits of an ordinary one, each module reset once and whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import preload, run_on_ranks
from sidestream.tests.sharding.meshes import MESHES, WORLD, options_of
from sidestream.tests.sharding.meta_models import Custom, Tied, gpt, on_meta, set_own
from sidestream.tests.sharding.twins import LEVELS
from sidestream.training.model import Block

preload("sidestream.training.model", "transformers")
SEED = 3


class Stack(nn.Module):
    """Units with attention, whose reset reaches into a child, between modules of the root, which
    have buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Linear(8, 5), nn.PReLU(), nn.Bilinear(1, 1, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length, 5] of int64 `tokens` [batch, length]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head[:2](self.norm(x.transpose(1, 2)).transpose(1, 2))


class Recurrent(nn.Module):
    """Modules that hold their weights in a list too, and one that passes a reset on to children
    though its constructor does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(3, 4, num_layers=2), nn.GRU(4, 4)])
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6])

    def forward(self, tokens: Tensor) -> Tensor:
        """Log probabilities."""
        x = nn.functional.one_hot(tokens % 3, 3).float()
        for layer in self.layers:
            x = layer(x)[0]
        return self.softmax.log_prob(x.flatten(0, 1))


class Small(nn.Module):
    """Fewer rows than ranks, in bf16, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((8, 1), (1, 3))
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=torch.bfloat16) for size in sizes)
        self.conv = nn.Conv1d(3, 2, 5, padding=2)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, 2, 1]."""
        x = torch.ones(len(tokens), 8, dtype=torch.bfloat16)
        for layer in self.layers:
            x = layer(x)
        return self.conv(x.float().unsqueeze(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[type[nn.Module]] | None]] = {
    "gpt": (gpt, [Block]),
    "attention and buffers": (Stack, [nn.TransformerEncoderLayer]),
    "one unit": (Stack, None),
    "tied": (Tied, [nn.Linear]),
    "recurrent": (Recurrent, [nn.LSTM, nn.GRU]),
    "small": (Small, [nn.Linear]),
}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    return {
        name: value.full_tensor() if isinstance(value, ss.ShardedTensor) else value.detach()
        for name, value in named
    }


def check_same(model: nn.Module, expected: nn.Module) -> None:
    got = values_of(model)
    for name, value in values_of(expected).items():
        # Main parameters may be wider.
        assert torch.equal(got[name], value.to(got[name].dtype)), name


def starts(rank: int, world_size: int, which: str) -> None:
    make, units = MODELS[which]
    tokens = torch.arange(12).view(2, 6) % 5
    for zero in LEVELS[world_size]:
        torch.manual_seed(SEED)
        ordinary = make()
        state = torch.get_rng_state()
        model = on_meta(make)
        torch.manual_seed(SEED + rank)
        ss.fully_shard(
            model, fsdp_unit_modules=units, zero_dp_strategy=zero, init_model_with_meta_device=True
        )
        check_same(model, ordinary)
        assert rank or torch.equal(torch.get_rng_state(), state), "what comes after draws otherwise"
        expected, got = ordinary(tokens), model(tokens)
        torch.testing.assert_close(got, expected)
        got.square().mean().backward()
        for unit in runtime_of(model).units:
            assert unit.main.isfinite().all(), "bad padding"


@pytest.mark.parametrize("world_size", LEVELS)
@pytest.mark.parametrize("which", MODELS)
def test_it_is_the_ordinary_start_with_the_same_seed(which: str, world_size: int) -> None:
    run_on_ranks(starts, world_size, which)


def applies(rank: int, world_size: int) -> None:
    expected = on_meta(Custom).to_empty(device="cpu")
    expected.embedding.weight = expected.head.weight
    torch.manual_seed(SEED)
    expected.apply(set_own)
    state = torch.get_rng_state()
    tokens = torch.arange(6).view(2, 3)
    for zero in LEVELS[world_size]:
        model = on_meta(Custom)
        torch.manual_seed(SEED + rank)
        ss.fully_shard(
            model,
            fsdp_unit_modules=[nn.Sequential],
            zero_dp_strategy=zero,
            init_model_with_meta_device=set_own,
        )
        check_same(model, expected)
        assert rank or torch.equal(torch.get_rng_state(), state)
        assert model.embedding.weight is model.head.weight
        assert "layers.0.1.angles" not in model.state_dict()
        assert torch.equal(model(tokens), expected(tokens))


@pytest.mark.parametrize("world_size", LEVELS)
def test_a_function_is_applied_as_module_apply_does(world_size: int) -> None:
    run_on_ranks(applies, world_size)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=32,
            tie_word_embeddings=True,
        )
    )


def llama_starts(rank: int, _world_size: int) -> None:
    expected = llama()
    torch.manual_seed(SEED)
    expected.apply(expected._init_weights)
    model = on_meta(llama)
    torch.manual_seed(SEED + rank)
    ss.fully_shard(
        model,
        fsdp_unit_modules=["LlamaDecoderLayer"],
        init_model_with_meta_device=model._init_weights,
    )
    check_same(model, expected)


def test_llama_of_transformers_by_its_own_function() -> None:
    pytest.importorskip("transformers")
    run_on_ranks(llama_starts, 2)


def test_modules_are_reset_once_and_alone() -> None:
    model = on_meta(gpt)
    calls = []

    def note(module: nn.Module) -> None:
        calls.append(module)
        whole = [name for name, param in model.named_parameters() if not param.is_meta]
        block = next((name for name in whole if name.startswith("blocks.")), "").split(".")[:2]
        assert all(name.split(".")[:2] == block for name in whole if block[0]), whole
        for param in module.parameters(recurse=False):
            assert type(param) is nn.Parameter and param.isnan().all()
            param.fill_(1.0)

    ss.fully_shard(model, fsdp_unit_modules=[Block], init_model_with_meta_device=note)
    assert len(calls) == len({id(module) for module in calls}) == len([*model.modules()])


def test_what_has_values_keeps_them() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    model.register_buffer("table", torch.randn(3))
    kept = {name: value.clone() for name, value in values_of(model).items()}
    meta = ("1.in_proj_weight", "2.weight")
    for name in meta:
        part, key = name.split(".")
        old = getattr(model[int(part)], key)
        setattr(model[int(part)], key, nn.Parameter(old.to("meta")))
    model.forward = lambda x: x
    ss.fully_shard(model, init_model_with_meta_device=True)
    got = values_of(model)
    for name, value in kept.items():
        assert name in meta or torch.equal(got[name], value), name
    assert all(got[name].isfinite().all() for name in meta)


class Buffers(nn.Module):
    """All that is not sharded, beside what is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("count", torch.tensor(7))
        self.order = nn.Parameter(torch.randperm(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """One use."""
        return self.linear(x)


def only_rank_0_has_it(rank: int, _world_size: int, zero: int) -> None:
    torch.manual_seed(SEED)
    expected = Buffers()
    torch.manual_seed(SEED)
    model = on_meta(Buffers) if rank else Buffers()
    state = torch.get_rng_state()
    ss.fully_shard(model, zero_dp_strategy=zero, init_model_with_meta_device=True)
    check_same(model, expected)
    assert type(model.order) is nn.Parameter and not model.order.requires_grad
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn where rank 0 has values"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.fully_shard_optimizer(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("zero", range(4))
def test_ranks_without_values_get_those_of_rank_0(zero: int) -> None:
    run_on_ranks(only_rank_0_has_it, 2, zero)


def trains_with_an_optimizer(rank: int, world_size: int) -> None:
    torch.manual_seed(SEED)
    plain = Tied()
    model = on_meta(Tied)
    torch.manual_seed(SEED)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    ss.fully_shard(
        model, optimizers[1], fsdp_unit_modules=[nn.Linear], init_model_with_meta_device=True
    )
    tokens = torch.arange(6).view(2, 3)
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in values_of(plain).items():
        torch.testing.assert_close(values_of(model)[name], value)


def test_an_optimizer_over_meta_parameters_goes_along() -> None:
    run_on_ranks(trains_with_an_optimizer, 2)


class Nested(nn.Transformer):
    """Its reset draws everything inside it again."""

    def __init__(self) -> None:
        super().__init__(4, 2, 1, 1, 6, batch_first=True)


def test_what_resets_all_inside_it_is_one_stage() -> None:
    expected = on_meta(Nested).to_empty(device="cpu")
    torch.manual_seed(SEED)
    for module in inside_out(expected):
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is not None:
            reset()
    model = on_meta(Nested)
    torch.manual_seed(SEED)
    units = [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer]
    ss.fully_shard(model, fsdp_unit_modules=units, init_model_with_meta_device=True)
    check_same(model, expected)


def inside_out(module: nn.Module) -> list[nn.Module]:
    return [part for child in module.children() for part in inside_out(child)] + [module]


def starts_on_a_mesh(rank: int, _world_size: int, mesh: str) -> None:
    tokens = torch.arange(12).view(2, 6) % 5
    for zero in (1, 3):
        torch.manual_seed(SEED)
        expected = Stack()
        model = on_meta(Stack)
        torch.manual_seed(SEED + rank)
        ss.fully_shard(
            model,
            fsdp_unit_modules=[nn.TransformerEncoderLayer],
            zero_dp_strategy=zero,
            init_model_with_meta_device=True,
            **options_of(mesh),
        )
        check_same(model, expected)
        torch.testing.assert_close(model(tokens), expected(tokens))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_starts_alike(mesh: str) -> None:
    run_on_ranks(starts_on_a_mesh, WORLD, mesh)


class Shares(nn.Module):
    """One module in two units."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Sequential(shared, nn.Linear(3, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """One use."""
        return self.layers[1](self.layers[0](x))


def test_a_module_of_two_units_is_reset_once() -> None:
    torch.manual_seed(SEED)
    expected = Shares()
    for initialiser in (True, lambda m: m.reset_parameters() if type(m) is nn.Linear else None):
        model = on_meta(Shares)
        torch.manual_seed(SEED)
        ss.fully_shard(
            model, fsdp_unit_modules=[nn.Sequential], init_model_with_meta_device=initialiser
        )
        check_same(model, expected)
