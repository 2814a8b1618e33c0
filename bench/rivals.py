"""Owns the candidates of the benches: one decoder trained plainly, by DDP, by FSDP2 (as it comes
and tuned) and by sidestream.

| name             | what it is                                                                 |
|------------------|----------------------------------------------------------------------------|
| `plain`          | the module alone: no communication, each rank trains its own copy          |
| `ddp`            | `DistributedDataParallel(gradient_as_bucket_view=True)`                    |
| `fsdp2`          | torch's `fully_shard` on every block and the root, resharded after forward |
| `fsdp2_tuned`    | the same with its collectives made of point-to-point messages: gloo's own  |
|                  | reduce-scatter moves as many bytes as an all-reduce                        |
| `zero0`..`zero3` | sidestream, called as a user would                                         |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from .. import full_state_dict, fully_shard
from .models import Block, Decoder, DecoderConfig, build_decoder

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Trainer:
    """A model with its optimizer, and how to train it one step and to read its full parameters."""

    name: str
    module: nn.Module
    optimizer: Optimizer
    read_parameters: Callable[[nn.Module], dict[str, Tensor]] = field(repr=False)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, optimizer step, zero_grad; the loss of this rank's batch as a 0-d
        tensor without graph.
        """
        loss: Tensor = self.module(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole float32 parameters by name; every rank must call it."""
        return self.read_parameters(self.module)


class MessageAllGather:
    """FSDP2's all-gather out of point-to-point messages, straight into the parts of the output."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A fresh buffer, as FSDP2's own collectives take."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`input_tensor` of every rank into its part of `output_tensor`; done when it returns,
        whatever `async_op` says.
        """
        rank, parts = group.rank(), output_tensor.view(group.size(), -1)
        flat_input = input_tensor.view(-1)
        pending = _exchange(group, lambda peer: flat_input, lambda peer: parts[peer])
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(flat_input)
        for work in pending:
            work.wait()
        return None


class MessageReduceScatter:
    """FSDP2's reduce-scatter out of point-to-point messages: a rank gets its part from each peer
    and adds in rank order.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A fresh buffer, as FSDP2's own collectives take."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """This rank's part of the sum (or mean) of all ranks' inputs; done when it returns,
        whatever `async_op` says.

        Raises ValueError for an operation other than SUM and AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"the reduction must be SUM or AVG, got {op}; "
                "leave the gradient divide factor unset."
            )
        rank, world = group.rank(), group.size()
        parts = input_tensor.view(world, -1)
        arrived = torch.empty_like(parts)
        pending = _exchange(group, lambda peer: parts[peer], lambda peer: arrived[peer])
        for work in pending:
            work.wait()
        total = output_tensor.view(-1)
        total.copy_(parts[rank] if rank == 0 else arrived[0])
        for peer in range(1, world):
            total.add_(parts[rank] if peer == rank else arrived[peer])
        if op == dist.ReduceOp.AVG:
            total.div_(world)
        return None


def _exchange(
    group: dist.ProcessGroup, outgoing: Callable[[int], Tensor], incoming: Callable[[int], Tensor]
) -> list[dist.Work]:
    rank, world = group.rank(), group.size()
    pending = []
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        pending.append(group.recv([incoming(source)], source, 0))
        pending.append(group.send([outgoing(target)], target, 0))
    return pending


def build_trainer(
    name: str, config: DecoderConfig, *, seed: int = 0, foreach: bool | None = None
) -> Trainer:
    """The decoder of `seed` under the candidate `name` (see the table above), with AdamW.

    Raises ValueError for a name that is not in `TRAINER_NAMES`.
    """
    if name not in _BUILDERS:
        raise ValueError(
            f"trainer must be one of {', '.join(TRAINER_NAMES)}, got {name!r}; choose one of them."
        )
    return _BUILDERS[name](name, build_decoder(config, seed=seed), foreach)


def _adamw(module: nn.Module, foreach: bool | None) -> AdamW:
    return AdamW(module.parameters(), lr=LEARNING_RATE, foreach=foreach)


def _build_plain(name: str, model: Decoder, foreach: bool | None) -> Trainer:
    return Trainer(name, model, _adamw(model, foreach), _read_plain)


def _build_ddp(name: str, model: Decoder, foreach: bool | None) -> Trainer:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # The wrapper prefixes every name with `module.`, so the model itself is read.
    return Trainer(name, wrapped, _adamw(wrapped, foreach), lambda _: _read_plain(model))


def _build_fsdp2(name: str, model: Decoder, foreach: bool | None) -> Trainer:
    # The base classes of the two collectives have no public name, so a type checker cannot see the
    # fit.
    shards: list[Any] = [
        torch_fully_shard(block, reshard_after_forward=True) for block in model.blocks
    ]
    shards.append(torch_fully_shard(model, reshard_after_forward=True))
    if name == "fsdp2_tuned":
        for shard in shards:
            shard.set_custom_all_gather(MessageAllGather())
            shard.set_custom_reduce_scatter(MessageReduceScatter())
    return Trainer(name, model, _adamw(model, foreach), _read_distributed)


def _build_sidestream(name: str, model: Decoder, foreach: bool | None) -> Trainer:
    module, optimizer = fully_shard(
        model,
        _adamw(model, foreach),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=int(name.removeprefix("zero")),
    )
    assert optimizer is not None
    return Trainer(name, module, optimizer, full_state_dict)


def _read_plain(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _read_distributed(module: nn.Module) -> dict[str, Tensor]:
    full = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), name
        full[name] = parameter.full_tensor().detach()
    return full


_BUILDERS: dict[str, Callable[[str, Decoder, bool | None], Trainer]] = {
    "plain": _build_plain,
    "ddp": _build_ddp,
    "fsdp2": _build_fsdp2,
    "fsdp2_tuned": _build_fsdp2,
    **{f"zero{level}": _build_sidestream for level in range(4)},
}
TRAINER_NAMES = tuple(_BUILDERS)
