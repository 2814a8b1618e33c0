"""What happens to gradients between backward and optimizer: each step on ranks, against sums in
plain PyTorch.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sidestream as ss
from sidestream.sharding.data_parallel_base import DataParallelBase
from sidestream.sharding.finalize_model_grads import finalize_model_grads
from sidestream.sharding.process_groups import ProcessGroupCollection
from sidestream.tests.ranks import preload, run_on_ranks

preload("torch.distributed.tensor", "torch.distributed.device_mesh")
WORLD = 4


def _values(rank, place, shape=(3, 5), dtype=torch.float32):
    """Of magnitudes whose sum depends on the order."""
    generator = torch.Generator().manual_seed(10 * place + rank)
    values = torch.randn(shape, generator=generator)
    return (values * 10 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)


def _sum(summands):
    """In FP32, in their order."""
    total = summands[0].float()
    for summand in summands[1:]:
        total = total + summand.float()
    return total


def _chunk(grads, marks=()):
    """A model with parameters of these names and gradients; a dot makes a module."""
    root = nn.Module()
    for name, grad in grads.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        for mark in dict(marks).get(name, ()):
            setattr(param, mark, True)
        module.register_parameter(leaf, param)
    return DataParallelBase(root)


def _grads(chunk):
    return {name: param.grad for name, param in chunk.module.named_parameters()}


# ---- single steps, all in one start of 4 ranks


def _tensor_parallel(rank, groups):
    names = {
        "norm.weight": torch.float32,
        "norm.bias": torch.bfloat16,
        "layer.q_layernorm.weight": torch.float32,
        "layer.blk_layernorm.weight": torch.float32,  # ends like a k_layernorm, and is none
        "averaged": torch.float32,
        "plain": torch.float32,
    }
    told = [
        {
            name: _values(other, place, dtype=dtype)
            for place, (name, dtype) in enumerate(names.items())
        }
        for other in range(WORLD)
    ]
    marks = {
        "norm.weight": ["sequence_parallel"],
        "norm.bias": ["sequence_parallel"],
        "averaged": ["average_gradients_across_tp_domain", "sequence_parallel"],
    }
    chunk = _chunk(told[rank], marks)
    norm = chunk.module.norm
    norm.weight.grad = told[rank]["norm.weight"].t().contiguous().t()  # lies otherwise
    told[1]["norm.bias"] = torch.zeros(3, 5)
    if rank == 1:
        norm.bias.grad = None
    finalize_model_grads(chunk, process_groups=groups)
    found = _grads(chunk)
    for name, dtype in names.items():
        expected = _sum([values[name] for values in told])
        if name == "averaged":
            expected = expected * torch.tensor(1 / WORLD)
        if name in ("plain", "layer.blk_layernorm.weight"):
            expected = told[rank][name]
        assert torch.equal(found[name], expected.to(dtype)), name


def _copies_in_chunks(rank, groups):
    """Conditional embedders, elastic routers: of one rank's chunks too."""
    for mark in ("pipeline_parallel", "flextron_router_pp_sync"):
        told = [[_values(other, chunk) for chunk in range(2)] for other in range(WORLD)]
        first = _chunk({"embedder": told[rank][0], "own": told[rank][0]}, {"embedder": [mark]})
        second = _chunk({"embedder": told[rank][1]}, {"embedder": [mark]})
        finalize_model_grads([first, second], process_groups=groups)
        expected = _sum([_sum(both) for both in told])
        assert torch.equal(_grads(first)["embedder"], expected)
        assert torch.equal(_grads(second)["embedder"], expected)
        assert torch.equal(_grads(first)["own"], told[rank][0])
    # In others two chunks' parameters of one name are two.
    chunks = [_chunk({"norm": told[rank][i]}, {"norm": ["sequence_parallel"]}) for i in range(2)]
    finalize_model_grads(chunks, process_groups=groups)
    for number, chunk in enumerate(chunks):
        assert torch.equal(_grads(chunk)["norm"], _sum([both[number] for both in told]))


def _embeddings(rank, pairs):
    """First and last stage call the tied weight otherwise; those between have none of it."""
    name = "embedding.weight" if rank < 2 else "output_layer.weight"
    grads = {name: _values(rank, 0), "position_embeddings.weight": _values(rank, 1)}
    first, last = rank % 2, rank % 2 + 2
    chunk = _chunk(grads, {name: ["shared_embedding"]})
    finalize_model_grads(chunk, process_groups=ProcessGroupCollection(embd=pairs, tp=pairs))
    sums = [_sum([_values(first, place), _values(last, place)]) for place in range(2)]
    found = _grads(chunk)
    assert torch.equal(found[name], sums[0])
    assert torch.equal(found["position_embeddings.weight"], _values(rank, 1))  # nobody shares it
    finalize_model_grads(chunk, process_groups=ProcessGroupCollection(embd=pairs, pos_embd=pairs))
    assert torch.equal(found["position_embeddings.weight"], sums[1])
    assert torch.equal(found[name], sums[0] + sums[0])


class _Router(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("local_tokens_per_expert", torch.tensor(tokens))
        self.register_buffer("expert_bias", torch.full((len(tokens),), 0.25))
        self.resets = []

    def reset_global_aux_loss_tracker(self):
        self.resets.append((self.expert_bias.tolist(), self.weight.grad.tolist()))


class _Disabled(nn.Module):
    expert_bias = local_tokens_per_expert = None


def _routers(rank, groups):
    tokens = [[4.0 * other, 7.0, 1.0, 0.0] for other in range(WORLD)]  # 24, 28, 4, 0: average 14
    module = nn.ModuleList([_Router(tokens[rank]), _Router([3, rank, 3 - rank]), _Disabled()])
    weight = module[0].weight
    weight.grad = torch.tensor([3.0, 1.0])
    module[1].weight.grad = torch.zeros(2)
    chunk = DataParallelBase(module)
    finalize_model_grads(chunk, 3, groups, expert_bias_update_rate=0.125)
    biases = [module[0].expert_bias.tolist(), module[1].expert_bias.tolist()]
    assert biases == [[0.125, 0.125, 0.375, 0.375], [0.125, 0.375, 0.375]]
    assert not module[0].local_tokens_per_expert.any()
    assert not module[1].local_tokens_per_expert.any()
    # Reset once, behind the biases and before the number of tokens.
    assert module[0].resets == [(biases[0], [3.0, 1.0])]
    assert torch.equal(weight.grad, torch.tensor([3.0, 1.0]) * torch.tensor(1 / 12))


class _Late(DataParallelBase):
    """Its gradients come when their exchange ends."""

    def finish_grad_sync(self):
        for param in self.module.parameters():
            param.grad = param.grad * 10


def _order_and_tokens(rank, pairs, alongside):
    """Stages are ranks 0, 2 and 1, 3; data-parallel ones 0, 1 and 2, 3."""
    chunk = _Late(_chunk({"norm": _values(rank, 0)}, {"norm": ["sequence_parallel"]}).module)
    count = torch.tensor([[5 + rank]])  # on the last stage: 7 + 8, and otherwise never mind
    groups = ProcessGroupCollection(pp=pairs, dp_cp=alongside, tp=alongside)
    finalize_model_grads([chunk], count, groups)
    peers = [0, 1] if rank < 2 else [2, 3]
    total = _sum([_values(other, 0) * 10 for other in peers])
    assert torch.equal(_grads(chunk)["norm"], total * torch.tensor(1 / 15))
    assert count.tolist() == [[5 + rank]]  # the caller's stays
    chunk = _chunk({"weight": torch.ones(2)})
    finalize_model_grads(chunk, 0, ProcessGroupCollection(pp=pairs, dp_cp=alongside))
    assert _grads(chunk)["weight"].tolist() == [1.0, 1.0]
    # Without a collection all ranks are data-parallel, and what chunks have is used.
    chunk = _chunk({"weight": torch.ones(2)}, {"weight": ["sequence_parallel"]})
    finalize_model_grads(chunk, torch.tensor(2**40 if rank else 0))
    assert _grads(chunk)["weight"].tolist() == [float(torch.tensor(1 / (3 * 2**40)))] * 2
    chunk = _chunk({"weight": torch.ones(2)}, {"weight": ["sequence_parallel"]})
    finalize_model_grads(
        DataParallelBase(chunk.module, ProcessGroupCollection(tp=dist.group.WORLD))
    )
    assert _grads(chunk)["weight"].tolist() == [4.0, 4.0]


def _refusals(rank, pairs):
    def refusal(kind, *args, **kwargs):
        with pytest.raises(kind) as caught:
            finalize_model_grads(*args, **kwargs)
        return str(caught.value)

    grads = {"a.weight": torch.ones(6), "b.weight": torch.ones(2)}
    marks = {name: ["sequence_parallel"] for name in grads}
    chunk = _Late(_chunk(grads, marks).module)
    wide = _chunk({"a": torch.ones(2, dtype=torch.float64)}, {"a": ["sequence_parallel"]})
    texts = {
        "dtype": refusal(ValueError, wide, process_groups=ProcessGroupCollection(tp=pairs)),
        "module": refusal(TypeError, chunk.module),
        "none": refusal(ValueError, []),
        "groups": refusal(TypeError, chunk, process_groups=pairs),
        "unset": refusal(AttributeError, chunk, process_groups=ProcessGroupCollection(pp=pairs)),
        "unset for tokens": refusal(
            AttributeError, chunk, 4, ProcessGroupCollection(tp=pairs, dp_cp=pairs)
        ),
        "tokens": refusal(ValueError, chunk, 4.0, ProcessGroupCollection(tp=pairs)),
        "a text": refusal(TypeError, chunk, "4", ProcessGroupCollection(tp=pairs)),
        "negative": refusal(ValueError, chunk, -4, ProcessGroupCollection(tp=pairs)),
        "many tokens": refusal(
            ValueError, chunk, torch.tensor([1, 2]), ProcessGroupCollection(tp=pairs)
        ),
        "rate": refusal(ValueError, chunk, expert_bias_update_rate=-1.0),
    }
    assert all(grad.eq(1).all() for grad in _grads(chunk).values())  # before the exchange
    # What only some ranks' parts of a group say. Nothing is summed, of other kinds neither.
    groups = ProcessGroupCollection(tp=dist.group.WORLD, pp=dist.group.WORLD)
    marks["embedder"] = ["pipeline_parallel"]
    grads["embedder"] = torch.ones(2)
    if rank == 2:
        grads["b.weight"] = torch.ones(3)
    other = _chunk(grads, marks)
    texts["shape"] = refusal(ValueError, other, process_groups=groups)
    assert all(grad.eq(1).all() for grad in _grads(other).values())
    chunk.module.b.weight.sequence_parallel = rank != 3
    texts["mark"] = refusal(ValueError, chunk, process_groups=groups)
    return texts


def _steps(rank, world_size):
    pairs = [dist.new_group([place, place + 2]) for place in range(2)][rank % 2]
    alongside = [dist.new_group([place, place + 1]) for place in (0, 2)][rank // 2]
    world = dist.group.WORLD
    _tensor_parallel(rank, ProcessGroupCollection(tp=world))
    _copies_in_chunks(rank, ProcessGroupCollection(pp=world, tp=world))
    _embeddings(rank, pairs)
    _routers(rank, ProcessGroupCollection(tp_dp_cp=world, pp=pairs, dp_cp=world))
    _order_and_tokens(rank, pairs, alongside)
    return _refusals(rank, pairs)


def test_each_step_gives_what_its_definition_says():
    for texts in run_on_ranks(_steps, WORLD):
        for name, words in {
            "module": ("DataParallelBase", "Module", "DistributedDataParallel"),
            "dtype": ("gradient of 'a'", "torch.float64"),
            "groups": ("ProcessGroupCollection", "ProcessGroup;"),
            "none": ("at least one, got none",),
            "unset": ("tp:",),
            "unset for tokens": ("pp:",),
            "tokens": ("num_tokens: expected a whole number of at least 0, got 4.0",),
            "a text": ("num_tokens: expected a whole number of at least 0, got '4'",),
            "negative": ("num_tokens: expected a whole number of at least 0, got -4",),
            "many tokens": ("one whole number", "(2,)"),
            "rate": ("expert_bias_update_rate", "-1.0"),
            "shape": ("'b.weight' of shape (2,)", "rank 0", "'b.weight' of shape (3,)", "rank 2"),
            "mark": ("'b.weight'", "rank 0", "nothing on rank 3"),
        }.items():
            assert all(word in texts[name] for word in words), texts[name]


# ---- sharded models


class _Stage(nn.Module):
    def __init__(self, tied_name, extra):
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.norm.weight.sequence_parallel = True
        self.rest = nn.Linear(3, extra)
        self.add_module(tied_name, nn.Linear(3, 7, bias=False))
        self.tied = tied_name
        self.get_submodule(tied_name).weight.shared_embedding = True

    def forward(self, x):
        return self.get_submodule(self.tied)(self.norm(x)).sum() + self.rest(x).sum()


class _Tied(nn.Linear):
    pass


def _trained(rank, mesh, zero, extra, units):
    """A stage, sharded, with gradients, and what they are without sharding on each rank."""
    torch.manual_seed(5)
    model = _Stage("embedding" if rank < 2 else "head", extra)
    inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
    plain = _Stage(model.tied, extra)
    plain.load_state_dict(model.state_dict())
    plain(inputs).backward()
    own = torch.cat([plain.norm.weight.grad, plain.get_submodule(model.tied).weight.grad.view(-1)])
    of_all = torch.empty(WORLD, len(own))
    dist.all_gather(list(of_all), own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.fully_shard(
        model, optimizer, device_mesh=mesh["dp"], zero_dp_strategy=zero, fsdp_unit_modules=units
    )
    model(inputs).backward()
    return DataParallelBase(model), of_all


def _own_groups(rank, mesh, groups):
    """A model knows its own groups: 9 + 10 and 11 + 12 tokens, of stages that sum the norm."""
    whole = {"embd": groups.embd, "tp": groups.tp, "dp_cp": mesh["dp"].get_group()}
    told = ProcessGroupCollection(**whole, pp=dist.new_subgroups(1)[0])
    model, inputs = nn.LayerNorm(3), torch.arange(3.0) * (rank + 1)
    model.bias.sequence_parallel = True
    config = ss.DistributedDataParallelConfig(calculate_per_token_loss=True)
    own_groups = ss.DistributedDataParallel(model, config, told)
    (own_groups(inputs).sum() * 2**rank).backward()
    finalize_model_grads(own_groups, 9 + rank)
    count = torch.tensor(1 / (19 if rank < 2 else 23))
    assert model.bias.grad.full_tensor().eq(15 * count).all()
    means = ss.DistributedDataParallel(nn.LayerNorm(3), None, told)
    with pytest.raises(ValueError, match="averages gradients over the ranks, got 9, by which"):
        finalize_model_grads(means, 9)


def _sharded(rank, world_size):
    """Stages of 2 data-parallel ranks: 0, 1 and 2, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    groups = ProcessGroupCollection(embd=mesh["pp"].get_group(), tp=mesh["pp"].get_group())
    for zero in (0, 1, 3):
        chunk, of_all = _trained(rank, mesh, zero, extra=2, units=[nn.Linear])
        finalize_model_grads(chunk, process_groups=groups)
        model = chunk.module
        expected = (of_all[0] + of_all[1]) * 0.5 + (of_all[2] + of_all[3]) * 0.5
        found = [model.norm.weight.grad, model.get_submodule(model.tied).weight.grad]
        assert all(isinstance(grad, ss.ShardedTensor) for grad in found)
        full = torch.cat([grad.full_tensor().view(-1) for grad in found])
        assert torch.equal(full, expected), zero
    # With others in its unit a tied weight is cut otherwise: refused by all, and nothing is summed.
    chunk, of_all = _trained(rank, mesh, 1, extra=2 if rank < 2 else 300, units=[])
    chunk.module.norm.weight.sequence_parallel = False
    with pytest.raises(ValueError) as caught:
        finalize_model_grads(chunk, process_groups=groups)
    own = of_all[rank // 2 * 2 : rank // 2 * 2 + 2].sum(0) * 0.5
    tied = chunk.module.get_submodule(chunk.module.tied).weight
    assert torch.equal(tied.grad.full_tensor().view(-1), own[3:])
    _own_groups(rank, mesh, groups)
    # What waits for its exchange has no values yet.
    with ss.no_sync(chunk.module):
        chunk.module(torch.ones(1, 3)).backward()
    with pytest.raises(RuntimeError, match="accumulated under no_sync"):
        finalize_model_grads(chunk, process_groups=groups)
    # PyTorch's own sharded tensors.
    weight = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh["dp"], [Shard(0)]))
    weight.sequence_parallel = True
    weight.grad = distribute_tensor(torch.full((5, 2), 1.0 + rank // 2), mesh["dp"], [Shard(0)])
    module = nn.Module()
    module.register_parameter("weight", weight)
    finalize_model_grads(DataParallelBase(module), process_groups=groups)
    assert weight.grad.full_tensor().eq(3.0).all()
    return str(caught.value)


def test_of_sharded_gradients_the_parts_are_summed():
    for text in run_on_ranks(_sharded, WORLD):
        assert "tied word embeddings" in text and "unit of their own" in text, text
        assert "elements" in text
