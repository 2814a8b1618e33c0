"""The candidates of `bench network`: one decoder, trained with what travels told apart.

| name                | computes in | gathered        | reduced, and how                          |
|---------------------|-------------|-----------------|-------------------------------------------|
| `plain`             | autocast    | nothing         | nothing: each rank trains its own copy    |
| `ddp`               | autocast    | nothing         | FP32, all-reduce                          |
| `ddp_bf16`          | autocast    | nothing         | bf16, torch's own `bf16_compress_hook`    |
| `fsdp2`             | the dtype   | the dtype       | FP32, gloo's reduce-scatter               |
| `fsdp2_bf16`        | the dtype   | the dtype       | bf16, gloo's reduce-scatter               |
| `fsdp2_tuned`       | the dtype   | the dtype       | FP32, by messages (see `fsdp2_messages`)  |
| `GRADIENTS/WEIGHTS` | the dtype   | as WEIGHTS says | as GRADIENTS says: sidestream, ZeRO-3     |

"The dtype" is bf16 unless asked otherwise; all keep main parameters and the optimizer in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .. import MixedPrecisionPolicy, fully_shard, summary
from .fsdp2_messages import MessageAllGather, MessageReduceScatter
from .models import Block, Decoder, DecoderConfig, build_decoder
from .rivals import Setup, build_adamw, train_step


@dataclass(frozen=True, kw_only=True)
class NetworkTrainer:
    """A model with its optimizer. `counted_bytes`: what this rank sends a step by the trainer's own
    count, None where it has none.
    """

    module: nn.Module
    optimizer: Optimizer
    counted_bytes: int | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Train on one batch; its loss, 0-d without graph."""
        return train_step(self.module, self.optimizer, tokens, targets)


def build_network_trainer(name: str, config: DecoderConfig, setup: Setup) -> NetworkTrainer:
    """The decoder of `setup.seed` under the candidate `name` (see the table above), with AdamW."""
    model = build_decoder(config, seed=setup.seed).to(setup.device)
    return _BUILDERS.get(name, _build_sidestream)(name, model, setup)


class _Autocast(nn.Module):
    """A model whose matrix products run in `dtype`, with its parameters and gradients in FP32."""

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch."""
        with torch.autocast(
            tokens.device.type, dtype=self._dtype, enabled=self._dtype != torch.float32
        ):
            loss: Tensor = self.model(tokens, targets)
        return loss


def _build_plain(name: str, model: Decoder, setup: Setup) -> NetworkTrainer:
    module = _Autocast(model, setup.dtype)
    return NetworkTrainer(module=module, optimizer=build_adamw(module, setup))


def _build_ddp(name: str, model: Decoder, setup: Setup) -> NetworkTrainer:
    module = DistributedDataParallel(_Autocast(model, setup.dtype), gradient_as_bucket_view=True)
    if name == "ddp_bf16":
        # By its own name DDP refuses torch's hook on a CPU, where all that it does works.
        module.register_comm_hook(
            dist.group.WORLD,
            lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
        )
    return NetworkTrainer(module=module, optimizer=build_adamw(module, setup))


def _build_fsdp2(name: str, model: Decoder, setup: Setup) -> NetworkTrainer:
    reduced = torch.bfloat16 if name == "fsdp2_bf16" else torch.float32
    policy = TorchPrecision(param_dtype=setup.dtype, reduce_dtype=reduced)
    # The base classes of the two collectives have no public name, so a type checker cannot see the
    # fit.
    shards: list[Any] = [
        torch_fully_shard(module, mesh=setup.mesh, mp_policy=policy)
        for module in (*model.blocks, model)
    ]
    if name == "fsdp2_tuned":
        for shard in shards:
            shard.set_custom_all_gather(MessageAllGather())
            shard.set_custom_reduce_scatter(MessageReduceScatter())
    return NetworkTrainer(module=model, optimizer=build_adamw(model, setup))


def _build_sidestream(name: str, model: Decoder, setup: Setup) -> NetworkTrainer:
    gradients, weights = name.split("/")
    module, optimizer = fully_shard(
        model,
        build_adamw(model, setup),
        device_mesh=setup.mesh,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        prefetch=setup.prefetch,
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=setup.dtype, grad_wire=gradients, param_wire=weights
        ),
    )
    assert optimizer is not None
    sent = summary(module).sent_bytes_per_step
    return NetworkTrainer(module=module, optimizer=optimizer, counted_bytes=sent)


_BUILDERS: dict[str, Callable[[str, Decoder, Setup], NetworkTrainer]] = {
    "plain": _build_plain,
    "ddp": _build_ddp,
    "ddp_bf16": _build_ddp,
    "fsdp2": _build_fsdp2,
    "fsdp2_bf16": _build_fsdp2,
    "fsdp2_tuned": _build_fsdp2,
}
