"""What a model is right after `fully_shard`: rank 0's values on every rank, marks, lanes."""

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.sharding.ranges import PREFIX
from sidestream.tests.ranks import run_on_ranks


class Start(nn.Module):
    """Parameters in two units, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.linear = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("table", torch.randn(2, 3))
        self.register_buffer("scratch", torch.randn(4).bfloat16(), persistent=False)
        self.register_buffer("transposed", torch.randn(2, 3).t())
        self.register_buffer("gaps", torch.randn(4, 6)[::2, ::3])
        self.register_buffer("expanded", torch.randn(3).expand(2, 3))
        self.register_buffer("repeated", torch.randn(1).expand(4))
        self.register_buffer("lone", torch.randn(6)[::6])
        self.register_buffer("fp8", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("complex", torch.randn(9, dtype=torch.complex64))
        self.register_buffer("short", torch.randint(999, (9,), dtype=torch.int16))
        self.register_buffer("sparse", torch.randn(3, 4).relu().to_sparse())
        self.order = nn.Parameter(torch.randperm(50), requires_grad=False)
        self.register_buffer("count", torch.randint(1 << 40, ()))
        self.register_buffer("mask", torch.randn(64) > 0)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)
        self.linear.register_buffer("table", self.table)

    def forward(self) -> None:
        """It is looked at, not called."""


def values_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    return {
        name: value.full_tensor()
        if isinstance(value, ss.ShardedTensor)
        else value.detach().to_dense()
        for name, value in named
    }


def same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and bytes_of(first) == bytes_of(second)


def bytes_of(tensor: Tensor) -> bytes:
    whole = tensor.clone(memory_format=torch.contiguous_format)
    return whole.view(-1).view(torch.uint8).numpy().tobytes()


def starts(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    expected = values_of(Start())
    for zero in range(4):
        torch.manual_seed(rank)
        model = Start()
        own = {name: value.clone() for name, value in values_of(model).items()}
        ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
        got = values_of(model)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert same(got[name], value), (zero, name)
        assert all(unit.main.isfinite().all() for unit in runtime_of(model).units), "bad padding"
        assert model.linear.table is model.table and model.nothing is None
        assert model.sparse.is_sparse and type(model.order) is nn.Parameter
        alike = {name for name, value in expected.items() if same(own[name], value)}
        assert rank == 0 or all(name == "empty" or name.startswith("norm.") for name in alike)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_starts_from_rank_0(world_size: int) -> None:
    run_on_ranks(starts, world_size)


@pytest.mark.parametrize("zero", range(4))
def test_hooks_of_before_see_full_parameters_and_their_marks(zero: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.no_decay = True
    seen = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    ss.fully_shard(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero)
    assert isinstance(model[0].weight, ss.ShardedTensor) and model[0].weight.no_decay
    assert not hasattr(model[1].weight, "no_decay")
    model(torch.zeros(2, 3))
    assert type(seen[0]) is nn.Parameter and seen[0].no_decay


def kinds_beside_compute(rank: int, world_size: int, zero: int, options: dict[str, bool]) -> set:
    """What has begun but is still to be waited for or to be completed while the model computes, by
    the trace of a step after the first.
    """
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.fully_shard(
        model, optimizer, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=zero, **options
    )
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found, under_way = set(), set()
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.name in ("aten::addmm", "aten::mm"):
            found |= {kind for kind, _ in under_way}
        elif event.name.startswith(PREFIX):
            verb, what = event.name.removeprefix(PREFIX).split(" ", 1)
            kind, unit = what.split("'")[:2]
            change = under_way.add if verb == "start" else under_way.discard
            change((kind.removesuffix(" of unit "), unit))
    return found


@pytest.mark.parametrize("gathers", [True, False], ids=["gathers beside", "gathers in line"])
@pytest.mark.parametrize(
    "reduces",
    [True, False, "pipelined"],
    ids=["reduces beside", "reduces in line", "reduces pipelined"],
)
def test_each_option_of_overlap_is_followed(gathers: bool, reduces: bool | str) -> None:
    options = {"overlap_param_gather": gathers, "overlap_grad_reduce": reduces}
    expected = {"gather"} if gathers else set()
    expected |= {"gradient exchange"} if reduces else set()
    for zero in (1, 3):
        for found in run_on_ranks(kinds_beside_compute, 2, zero, options):
            assert found == expected, zero
