"""`DistributedDataParallel` under Megatron-Core's names: `fully_shard` with units that are buckets.

    theirs                        here
    bucket, bucket group          a unit: one exchange, in FP32 and in rank order
    use_distributed_optimizer     ZeRO-1, else ZeRO-0
    optimizer instances           HSDP: parts inside an instance, copies across
    main_grad                     `param.grad`

So step, checkpoints, wires, clipping, errors and `summary(model.module)` are those of
`fully_shard`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .arguments import require_forward, require_kind
from .data_parallel_base import DataParallelBase
from .data_parallel_config import ALL_PATTERNS, DistributedDataParallelConfig
from .data_parallel_groups import held_device_type, initialize_from_environment
from .entries import gathered
from .exchange_sums import exchange_sums
from .expert_ranks import is_expert, model_ranks
from .fully_shard import no_sync, runtime_of, shard
from .fused_gradients import allow_fused_gradients
from .gradient_checks import CHECKS, GradientChecks
from .mesh_axes import SHARD_AXIS
from .messages import listed
from .param_waits import ParamWaits
from .process_groups import OUTER_AXIS, ProcessGroupCollection, initialize_model_parallel
from .runtime import Runtime
from .shard_config import ShardConfig, resolve_config


class DistributedDataParallel(DataParallelBase):
    """`module` on every data-parallel rank, with gradients that are exchanged in buckets.

    Outside forward and backward the parameters are `ShardedTensor`s in FP32; give an optimizer made
    from them to `fully_shard_optimizer`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        process_groups: ProcessGroupCollection | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Bring rank 0's values to all ranks and bind `optimizer`, if it was made before.

        Args:
            module: the whole model, on CPU or the rank's GPU; stays reachable as `.module`.
            config: None: the defaults.
            process_groups: whose data-parallel ranks take part (None: all ranks). Parameters marked
                `allreduce=False` are those of experts, reduced over the ranks that hold the same.

        Raises:
            TypeError: an argument of another type.
            ValueError: optimizer instances that do not divide the ranks, or are others than those
                of `process_groups`; a name pattern without a parameter; parameters of experts
                without `process_groups`; what `fully_shard` refuses. Nothing has been changed then.
        """
        super().__init__(module, process_groups)
        require_forward(module)
        self.config = config = DistributedDataParallelConfig() if config is None else config
        require_kind("config", config, DistributedDataParallelConfig)
        self.averages_gradients = not config.calculate_per_token_loss
        _check_patterns(module, config)
        device_type = held_device_type(module)
        mesh = _mesh(config, process_groups, device_type)
        of_experts = None
        if process_groups is not None and any(map(is_expert, module.parameters())):
            of_experts = process_groups.data_parallel_mesh(expert=True, device_type=device_type)
        inner = None if mesh is None else SHARD_AXIS
        outer = OUTER_AXIS if config.num_distributed_optimizer_instances > 1 else None
        # Options of which `fully_shard` knows nothing, for which ranks communicate.
        checks = [name for name in CHECKS if getattr(config, name)]
        runtime = shard(
            module,
            optimizer,
            _shard_config(config, mesh, outer),
            functools.partial(model_ranks, mesh, inner, outer, of_experts),
            elementwise=False,
            told={name: str(name in checks) for name in CHECKS},
        )
        runtime.sync = config.overlap_grad_reduce
        if checks:
            runtime.after_exchanges = GradientChecks(runtime, checks)
        allow_fused_gradients(runtime)
        if config.overlap_param_gather:
            ParamWaits(module, runtime)

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(self.module)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside add to this rank's own gradients, in FP32, without communication."""
        return no_sync(self.module)

    def start_param_sync(self) -> None:
        """Start to gather the parameters that the optimizer has changed, on all ranks alike; else
        the next forward does.
        """
        for unit in self._runtime.units:
            self._runtime.start_gather(unit)

    def finish_grad_sync(self) -> None:
        """Have all gradients exchanged, on all ranks alike: what a backward has exchanged already
        stays as it is, however often this is called.

        Raises:
            CommunicationError: a rank is gone.
            NonFiniteGradientError: with `check_for_nan_in_grad`.
            RuntimeError: a backward runs.
        """
        exchange_sums(self._runtime)

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor`, a number or a tensor of one element.

        Raises:
            RuntimeError: some were not exchanged yet, or the model runs.
            TypeError, ValueError: it is no such factor.
        """
        self._require_rest("scale_gradients")
        self._runtime.check_reduced("scale_gradients")
        super().scale_gradients(factor)

    def broadcast_params(self) -> None:
        """Give all ranks that hold the same parameters the values of the first (a collective).
        Needs memory for all parameters once more.

        Raises:
            RuntimeError: the model runs, forward or backward.
        """
        self._require_rest("broadcast_params")
        with gathered(self.module, write=True), torch.no_grad():
            for unit in self._runtime.units:
                assert unit.faces.whole is not None
                for name, param in zip(unit.spec.names, unit.faces.whole, strict=True):
                    flat = param.detach().view(-1).view(torch.uint8)  # gloo refuses some dtypes
                    unit.collectives.broadcast(flat, f"broadcast of parameter '{name}'")

    def _holders(self) -> Iterable[Tensor]:
        # Those of the optimizer: a unit has few.
        return [run.param for unit in self._runtime.units for run in unit.gradients.runs]

    def _require_rest(self, caller: str) -> None:
        if self._runtime.runs_backward or self._runtime.root_calls:
            raise RuntimeError(
                f"{caller}: expected a model that does not run, got a call from inside its forward "
                "or backward, which use its parameters and gradients; call it between steps"
            )


def _check_patterns(module: nn.Module, config: DistributedDataParallelConfig) -> None:
    """Refuse patterns that would go unheeded.

    Raises:
        ValueError: they match no parameter.
    """
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    for pattern in config.param_name_patterns_for_fp32_local_accumulation:
        if pattern != ALL_PATTERNS and not fnmatch.filter(trained, pattern):
            raise ValueError(
                "param_name_patterns_for_fp32_local_accumulation: expected patterns that match a "
                f"trainable parameter, got {pattern!r}, which matches none of {listed(trained)}; "
                "correct it or leave it out"
            )


def _mesh(
    config: DistributedDataParallelConfig,
    process_groups: ProcessGroupCollection | None,
    device_type: str | None,
) -> DeviceMesh | None:
    """(instances, ranks of an instance), all ranks of one instance, or None for all there are."""
    initialize_from_environment()
    instances = config.num_distributed_optimizer_instances
    if process_groups is None and instances == 1:
        return None
    groups = process_groups or _groups_of(instances)
    mesh = groups.data_parallel_mesh(device_type=device_type)
    found = 1 if mesh.ndim == 1 else mesh.size(0)
    if found != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances: expected {found}, as process_groups have, "
            f"got {instances}; make the groups with as many instances as the config says"
        )
    return mesh


def _groups_of(instances: int) -> ProcessGroupCollection:
    """All ranks, in that many instances (a collective)."""
    names = ("intra_dp_cp", "inter_dist_opt")
    made = initialize_model_parallel(num_distributed_optimizer_instances=instances, groups=names)
    return ProcessGroupCollection(**made.groups, dp_cp=dist.group.WORLD)


def _shard_config(
    config: DistributedDataParallelConfig, mesh: DeviceMesh | None, outer_dim: str | None
) -> ShardConfig:
    resolved = resolve_config(
        int(config.use_distributed_optimizer),
        config.policy(),
        outer_dim=outer_dim,
        gradient_divide_factor=1.0 if config.calculate_per_token_loss else None,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    all_ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = config.unit_sizes(all_ranks if mesh is None else mesh.size())
    return dataclasses.replace(resolved, sizes=sizes)
