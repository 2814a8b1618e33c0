"""Inside `gathered` parameters are whole on every mesh, and what is written counts or is refused;
edits of the parts outside count too.
"""

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.meshes import CASES, MESHES, WORLD, options_of
from sidestream.tests.sharding.trainer import Block, Transformer, batch

BF16 = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
POLICIES = {"one dtype": ss.MixedPrecisionPolicy(), "narrow": BF16}


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Transformer(num_blocks=1)


def sharded(zero: int, **options: object) -> nn.Module:
    return ss.fully_shard_model(make(), fsdp_unit_modules=[Block], zero_dp_strategy=zero, **options)


def check(model: nn.Module, plain: nn.Module, what: object) -> None:
    """The sharded model's values are the plain one's, and those that it computes with too."""
    expected = plain.state_dict()
    for name, value in ss.full_state_dict(model).items():
        assert torch.equal(value, expected[name]), (what, name)
    with torch.no_grad():
        dtype = next(iter(model.parameters())).dtype
        close = model(batch(0)).to(dtype)
        torch.testing.assert_close(close, plain(batch(0)), rtol=0.05, atol=0.05)


def read_and_write(rank: int, world_size: int, policy: str) -> None:
    options = {mesh: options_of(mesh) for mesh in MESHES}
    for mesh, zero in CASES:
        model = sharded(zero, mixed_precision_policy=POLICIES[policy], **options[mesh])
        plain = make()
        with ss.gathered(model):
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(param, expected.to(param.dtype)), (mesh, zero)
        with ss.gathered(model, write=True), torch.no_grad():
            for param in model.parameters():
                param.view(-1)[::3] = 0.5
        for param in plain.parameters():
            # Where nothing was written, main values keep what the compute dtype does not show.
            param.data.view(-1)[::3] = 0.5
        check(model, plain, (mesh, zero))
        with torch.no_grad():
            for param in [*model.parameters(), *plain.parameters()]:
                param.mul_(0.5)
        check(model, plain, (mesh, zero, "halved"))


@pytest.mark.parametrize("policy", POLICIES)
def test_all_ranks_read_whole_parameters_and_write_them(policy: str) -> None:
    run_on_ranks(read_and_write, WORLD, policy)


def write_otherwise(rank: int, world_size: int) -> None:
    options = {mesh: options_of(mesh) for mesh in MESHES}
    for mesh, zero in CASES:
        model, plain = sharded(zero, **options[mesh]), make()
        weight = "blocks.0.mlp.up.weight"
        numel = plain.state_dict()[weight].numel()
        for writer in range(world_size):
            # In an element of each part, so that ranks which hold it too, and none, differ.
            for element in (0, numel // 2, numel - 1):
                with (
                    pytest.raises(RuntimeError, match=f"'{weight}' was given other values on some"),
                    ss.gathered(model, write=True),
                    torch.no_grad(),
                ):
                    model.get_parameter(weight).view(-1)[element] = float(rank == writer)
                check(model, plain, (mesh, zero, writer, element))


def test_a_write_of_one_rank_is_refused_on_all_whoever_holds_the_element() -> None:
    run_on_ranks(write_otherwise, WORLD)
