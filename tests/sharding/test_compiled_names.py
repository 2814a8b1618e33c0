"""Names in messages and summaries are those of the model as it is without `torch.compile`."""

import re

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.twins import Twins, square_loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


def wrap(sequence: nn.Module) -> None:
    sequence[1] = torch.compile(sequence[1], backend="eager")


def wraps_between_steps(rank: int, world_size: int, folder: str) -> None:
    for zero in range(4):
        torch._dynamo.reset()
        twins = Twins(rank, world_size, model(), zero, [Block])
        twins.train(square_loss, (3, 4), steps=1)
        wrap(twins.sharded)
        for step in (1, 2):
            twins.backward(square_loss, twins.data(step, 3, 4))
            for plain, sharded in zip(
                twins.plain.parameters(), twins.sharded.parameters(), strict=True
            ):
                torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)
            twins.step()
        path = f"{folder}/{zero}"
        ss.save_checkpoint(path, twins.sharded, twins.optimizer)
        ss.load_checkpoint(path, twins.sharded, twins.optimizer)
        twins.sharded[1].extra = nn.Parameter(torch.ones(()))
        with pytest.raises(RuntimeError, match=r"got '1.extra' besides"):
            twins.sharded(torch.ones(1, 4))
        del twins.sharded[1].extra
        twins.sharded[1]._orig_mod.linear = nn.Identity()
        with pytest.raises(RuntimeError, match=r"got '1.linear.weight', '1.linear.bias' taken out"):
            ss.save_checkpoint(path, twins.sharded, twins.optimizer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_block_wrapped_between_steps_goes_on_and_messages_name_what_users_have(
    world_size: int, tmp_path: str
) -> None:
    run_on_ranks(wraps_between_steps, world_size, str(tmp_path))


def test_a_model_wrapped_before_is_refused_and_summed_up_by_plain_names() -> None:
    wrapped = model()
    wrap(wrapped)
    block = wrapped[1]._orig_mod
    block.register_buffer("table", torch.ones(2, device="meta"))
    block.held = (block.linear.weight,)
    with pytest.raises(ValueError, match=r"buffer '1.table' is on the meta device"):
        ss.fully_shard(wrapped, fsdp_unit_modules=[Block])
    del block.table
    with pytest.raises(ValueError, match=r"got it in 1.held\b"):
        ss.fully_shard(wrapped, fsdp_unit_modules=[Block])
    del block.held
    ss.fully_shard(wrapped, fsdp_unit_modules=[Block])
    text = str(ss.summary(wrapped))
    assert "_orig_mod" not in text and re.search(r"^\s*1\b", text, re.MULTILINE), text
