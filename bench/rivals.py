"""The candidates of the benches: one decoder trained plainly, by DDP, by FSDP2 (as it comes and
tuned), by Megatron-FSDP and by sidestream.

| name             | what it is                                                                 |
|------------------|----------------------------------------------------------------------------|
| `plain`          | the module alone: no communication, each rank trains its own copy          |
| `ddp`            | `DistributedDataParallel(gradient_as_bucket_view=True)`                    |
| `ddp_zero1`      | the same with `ZeroRedundancyOptimizer`, parameters in its buckets         |
| `fsdp2`          | torch's `fully_shard` on every block and the root, with its own defaults   |
| `fsdp2_tuned`    | the same with its collectives made of messages, see `fsdp2_messages`       |
| `megatron_fsdp`  | `megatron_fsdp.fully_shard`, ZeRO-3, where it is installed, on a GPU       |
| `zero0`..`zero3` | sidestream, called as a user would                                         |
| `buckets`        | sidestream's own `DistributedDataParallel`, with DDP's buckets of 25 MiB   |

In bfloat16 all that can keep their main parameters and the optimizer in float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from .. import MixedPrecisionPolicy, full_state_dict, fully_shard, fully_shard_optimizer
from ..sharding.data_parallel import DistributedDataParallel as BucketedDataParallel
from ..sharding.data_parallel_config import DistributedDataParallelConfig
from ..sharding.process_groups import ProcessGroupCollection
from ..training.errors import UsageError
from .fsdp2_messages import MessageAllGather, MessageReduceScatter
from .models import TENSORS_A_BLOCK, Block, Decoder, DecoderConfig, build_decoder
from .trainer_names import FSDP2, MEGATRON_FSDP, PLAIN, TRAINER_NAMES

LEARNING_RATE = 3e-4
# DTensor decides how an operator over a list of tensors is sharded at the first call with such a
# list, in time quadratic in its length (34 s for 900 tensors). Groups of as many equal blocks are
# lists that it knows.
TENSORS_A_GROUP = 25 * TENSORS_A_BLOCK
_FLOAT32_ONLY = (PLAIN, "ddp", "ddp_zero1", "buckets")
_BUCKET_MIB = 25.0  # DDP's default


@dataclass(frozen=True)
class Trainer:
    """A model with its optimizer, and how to train it one step and to read its full parameters."""

    name: str
    module: nn.Module
    optimizer: Optimizer
    read_parameters: Callable[[nn.Module], dict[str, Tensor]] = field(repr=False)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """See `train_step`."""
        return train_step(self.module, self.optimizer, tokens, targets)

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole float32 parameters by name; every rank must call it."""
        return self.read_parameters(self.module)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a trainer is built.

    foreach: AdamW's option. mesh: its ranks, by default all. dtype: of forward, backward and wire.
    prefetch: units that ours gather ahead in `bench network`.
    """

    seed: int = 0
    foreach: bool | None = None
    mesh: DeviceMesh | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    prefetch: int = 1


def require_trainer(name: str, device_type: str, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a candidate that does not exist or cannot run there.

    Raises:
        UsageError: it says why, and what to do instead.
    """
    if name not in TRAINER_NAMES:
        raise UsageError(
            f"trainer: expected one of {', '.join(TRAINER_NAMES)}, got {name!r}; choose one of them"
        )
    if name == MEGATRON_FSDP and importlib.util.find_spec(MEGATRON_FSDP) is None:
        raise UsageError(
            f"{name}: expected the package megatron-fsdp, got no such module; "
            "pip install megatron-fsdp, or leave it out"
        )
    if name == MEGATRON_FSDP and device_type != "cuda":
        raise UsageError(
            f"{name}: expected a GPU, since it makes CUDA streams whatever it trains on, got "
            f"{device_type}; leave it out here"
        )
    if name == "fsdp2_tuned" and device_type != "cpu":
        raise UsageError(
            f"{name}: expected cpu, since its messages are made for gloo, got {device_type}; "
            "compare with fsdp2"
        )
    if name in _FLOAT32_ONLY and dtype != torch.float32:
        raise UsageError(
            f"{name}: expected torch.float32, since it keeps no main parameters beside others, got "
            f"{dtype}; leave it out"
        )


def build_trainer(name: str, config: DecoderConfig, setup: Setup | None = None) -> Trainer:
    """The decoder of `setup.seed` under the candidate `name` (see the table above), with AdamW.

    Raises UsageError where `require_trainer` does.
    """
    setup = setup or Setup()
    require_trainer(name, setup.device.type, setup.dtype)
    model = build_decoder(config, seed=setup.seed).to(setup.device)
    return _BUILDERS[name](name, model, setup)


def train_step(module: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Forward, backward, optimizer step, zero_grad; the loss of this rank's batch as a 0-d tensor
    without graph.
    """
    loss: Tensor = module(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def build_adamw(module: nn.Module, setup: Setup) -> AdamW:
    """The optimizer of all candidates over what `module` has."""
    params = list(module.parameters())
    starts = range(0, len(params), TENSORS_A_GROUP)
    groups = [{"params": params[start : start + TENSORS_A_GROUP]} for start in starts]
    return AdamW(groups, lr=LEARNING_RATE, foreach=setup.foreach)


def _build_plain(name: str, model: Decoder, setup: Setup) -> Trainer:
    return Trainer(name, model, build_adamw(model, setup), _read_plain)


def _build_ddp(name: str, model: Decoder, setup: Setup) -> Trainer:
    group = None if setup.mesh is None else setup.mesh.get_group()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, process_group=group)
    zero1 = name == "ddp_zero1"
    optimizer = _zero_redundancy_adamw(model, setup, group) if zero1 else build_adamw(model, setup)
    # The wrapper prefixes every name with `module.`, so the model itself is read.
    return Trainer(name, wrapped, optimizer, lambda _: _read_plain(model))


def _zero_redundancy_adamw(
    model: Decoder, setup: Setup, group: dist.ProcessGroup | None
) -> Optimizer:
    # Its package scripts functions when it is imported, which torch itself warns of.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(
        model.parameters(),
        AdamW,
        process_group=group,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        foreach=setup.foreach,
    )


def _build_fsdp2(name: str, model: Decoder, setup: Setup) -> Trainer:
    options: dict[str, Any] = {"mesh": setup.mesh}
    if setup.dtype != torch.float32:
        options["mp_policy"] = TorchPrecision(param_dtype=setup.dtype)
    # The base classes of the two collectives have no public name, so a type checker cannot see the
    # fit.
    shards: list[Any] = [torch_fully_shard(module, **options) for module in (*model.blocks, model)]
    if name == "fsdp2_tuned":
        for shard in shards:
            shard.set_custom_all_gather(MessageAllGather())
            shard.set_custom_reduce_scatter(MessageReduceScatter())
    return Trainer(name, model, build_adamw(model, setup), _read_distributed)


def _build_megatron_fsdp(name: str, model: Decoder, setup: Setup) -> Trainer:
    api: Any = importlib.import_module(MEGATRON_FSDP)
    options: dict[str, Any] = {}
    # It makes a mesh of its own, of all ranks: one that is given must have a tensor-parallel axis.
    assert setup.mesh is None or setup.mesh.size() == dist.get_world_size()
    if setup.dtype != torch.float32:
        options["mixed_precision_policy"] = api.MixedPrecisionPolicy(
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.float32,
            grad_comm_dtype=setup.dtype,
        )
    # Wrapping takes an optimizer step with zero gradients, to have its state: with a rate of zero
    # that leaves the weights alone, and the count of steps is set back below.
    module, optimizer = api.fully_shard(
        model.to(setup.dtype),
        AdamW(model.parameters(), lr=0.0, foreach=setup.foreach),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        device=setup.device,
        **options,
    )
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    for state in optimizer.state.values():
        state["step"].zero_()
    return Trainer(name, module, optimizer, _read_megatron)


def _build_sidestream(name: str, model: Decoder, setup: Setup) -> Trainer:
    policy = MixedPrecisionPolicy(param_dtype=None if setup.dtype == torch.float32 else setup.dtype)
    module, optimizer = fully_shard(
        model,
        build_adamw(model, setup),
        device_mesh=setup.mesh,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=int(name.removeprefix("zero")),
        mixed_precision_policy=policy,
    )
    assert optimizer is not None
    return Trainer(name, module, optimizer, full_state_dict)


def _build_buckets(name: str, model: Decoder, setup: Setup) -> Trainer:
    mesh = setup.mesh
    groups = None if mesh is None else ProcessGroupCollection(dp_cp=mesh.get_group())
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_mib=_BUCKET_MIB)
    wrapped = BucketedDataParallel(model, config, groups)
    optimizer = fully_shard_optimizer(build_adamw(wrapped, setup))
    return Trainer(name, wrapped, optimizer, lambda _: full_state_dict(model))


def _read_plain(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _read_distributed(module: nn.Module) -> dict[str, Tensor]:
    full = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), name
        full[name] = parameter.full_tensor().detach()
    return full


def _read_megatron(module: nn.Module) -> dict[str, Tensor]:
    gather: Any = importlib.import_module(f"{MEGATRON_FSDP}.uneven_dtensor")
    return {
        name.removeprefix("module."): gather.uneven_dtensor_to_full_tensor(shard).float()
        for name, shard in module.state_dict().items()
    }


_BUILDERS: dict[str, Callable[[str, Decoder, Setup], Trainer]] = {
    PLAIN: _build_plain,
    "ddp": _build_ddp,
    "ddp_zero1": _build_ddp,
    FSDP2: _build_fsdp2,
    "fsdp2_tuned": _build_fsdp2,
    MEGATRON_FSDP: _build_megatron_fsdp,
    **{f"zero{level}": _build_sidestream for level in range(4)},
    "buckets": _build_buckets,
}
