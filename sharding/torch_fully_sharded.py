"""A model that PyTorch's own FSDP2 shards, behind the interface of a data-parallel model.

    a unit      an instance of `fsdp_unit_modules`, or of a class in some module's `_fsdp_modules`
    the root    what lies in no unit
    an element  sharded along the mesh's last axis, replicated along the one before it, if any

FSDP2 gathers, exchanges and averages, or sums, by itself, in the backend's order of sums. What is
added here is what it leaves to its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .arguments import require_flag, require_forward, require_kind
from .bits import once_in_memory
from .build import refuse_assignment
from .data_parallel_base import DataParallelBase, own_part
from .data_parallel_groups import held_device_type
from .errors import communicating
from .fsdp2_units import require_apart, require_shardable, units_in
from .fully_shard import is_sharded
from .messages import listed
from .modules.partition import is_dtensor
from .modules.unit_classes import UnitClass
from .process_groups import ProcessGroupCollection

# Two seconds of import, which only who shards by FSDP2 needs.
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class TorchFullyShardedDataParallelConfig:
    """Arguments of `torch.distributed.fsdp.fully_shard`, which explains them. mp_policy: torch's
    own; None: gradients and parameters travel in the parameters' dtype. And one of ours:
    calculate_per_token_loss: gradients are sums; `finalize_model_grads` divides by the tokens.

    Raises:
        TypeError: a calculate_per_token_loss that is no bool.
    """

    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy | None = None
    calculate_per_token_loss: bool = False

    def __post_init__(self) -> None:
        require_flag("calculate_per_token_loss", self.calculate_per_token_loss)


class TorchFullyShardedDataParallel(DataParallelBase):
    """`module`, sharded in place over the ranks of `mesh` by PyTorch's FSDP2, starting from the
    values of the first of them. Make the optimizer afterwards, over `parameters()`.

    Attributes that were set on parameters are on their sharded and their gathered forms too.
    `save_checkpoint`, `load_checkpoint` and `full_state_dict` take it as they take ours, and
    `load_state_dict` takes whole tensors as well as sharded ones (a collective where they are
    sharded otherwise); it refuses `assign`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: TorchFullyShardedDataParallelConfig | None = None,
        process_groups: ProcessGroupCollection | None = None,
        *,
        mesh: DeviceMesh | None = None,
        fsdp_unit_modules: Iterable[UnitClass] | None = None,
    ) -> None:
        """mesh: one axis, or two, of which the first has replicas; default: that of
        `process_groups`, or all ranks of the job. fsdp_unit_modules: classes, their names or import
        paths, as `sidestream.fully_shard` takes them; instances may lie in one another.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: process_groups and mesh at once; a module that is sharded already; a unit
                without a forward; parameters that are shared by two units, or that FSDP2 cannot
                shard: without a dimension, trainable and empty, not contiguous, or of experts.
            RuntimeError: no process group.
            CommunicationError: a rank is gone.
        """
        super().__init__(module, process_groups)
        require_forward(module)
        if is_sharded(module) or any(map(is_dtensor, module.parameters())):
            raise ValueError(
                "module: expected plain parameters, got some that are sharded already; pass the "
                "model as it was before fully_shard"
            )
        from torch.distributed.fsdp import MixedPrecisionPolicy

        self.config = config = TorchFullyShardedDataParallelConfig() if config is None else config
        require_kind("config", config, TorchFullyShardedDataParallelConfig)
        policy = MixedPrecisionPolicy() if config.mp_policy is None else config.mp_policy
        require_kind("mp_policy", policy, MixedPrecisionPolicy)
        self._mesh = _mesh_of(process_groups, mesh, held_device_type(module))
        require_shardable(module, self._mesh.size())
        units = units_in(module, fsdp_unit_modules)
        require_apart(module, units)
        self._syncs = True
        self.averages_gradients = not config.calculate_per_token_loss
        self.broadcast_params()
        for part in (*units, module):
            _shard(
                part,
                mesh=self._mesh,
                reshard_after_forward=config.reshard_after_forward,
                mp_policy=policy,
            )
        for sharded in self._sharded_modules() if config.calculate_per_token_loss else ():
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        for inner in module.modules():
            inner.register_load_state_dict_pre_hook(refuse_assignment)
            inner.register_load_state_dict_pre_hook(_take_own_parts)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to this rank's own, whole gradients; the next one outside exchanges
        the sum.
        """
        root: Any = self.module
        before, self._syncs = self._syncs, False
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._syncs = before
            root.set_requires_gradient_sync(before)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """With the parameters that an optimizer takes, sharded: a forward without gradients may
        have left gathered ones in their place. So `parameters()` gives those, here and around it.
        """
        for part in self._sharded_modules():
            part.reshard()
        return super().named_modules(memo, prefix, remove_duplicate)

    def finish_grad_sync(self) -> None:
        """See that every gradient was exchanged, which the backward has done.

        Raises:
            RuntimeError: some were only added under `no_sync`, and no backward came after it.
        """
        self._require_exchanged("finish_grad_sync")

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor`, a number or a tensor of one element.

        Raises:
            RuntimeError: some gradients wait for their exchange under `no_sync`.
            TypeError, ValueError: another factor.
        """
        self._require_exchanged("scale_gradients")
        super().scale_gradients(factor)

    def zero_grad_buffer(self) -> None:
        """Clear all gradients, also those that were only added under `no_sync`, which
        `optimizer.zero_grad()` leaves there.
        """
        super().zero_grad_buffer()
        for _, state in self._unexchanged():
            state.unsharded_accumulated_grad = None
            state.unsharded_param.grad = None

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Give parameters and buffers the first rank's values, those that are sharded along the
        axes where they are replicated. On the meta device there are none.

        Raises:
            CommunicationError: a rank is gone.
        """
        tensors: list[Any] = [*self.parameters(), *self.module.buffers()]
        for tensor in tensors:
            if tensor.is_meta:
                continue
            once = once_in_memory(own_part(tensor))
            # As bytes of memory in one piece: gloo refuses some dtypes.
            staged = once.to(self._mesh.device_type).contiguous().view(-1).view(torch.uint8).clone()
            for axis, group in enumerate(self._mesh.get_all_groups()):
                if not is_dtensor(tensor) or tensor.placements[axis].is_replicate():
                    with communicating("broadcast of the first rank's values"):
                        dist.broadcast(staged, group=group, group_src=0)
            once.copy_(staged.view(once.dtype).view(once.shape))

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        """The units and the root; none before they are sharded."""
        from torch.distributed.fsdp import FSDPModule

        return (part for part in self.module.modules() if isinstance(part, FSDPModule))

    def _unexchanged(self) -> Iterator[tuple[str, Any]]:
        """What holds a whole gradient that no backward has exchanged, with its parameter's name."""
        # Private names of torch 2.11 to 2.14: no public one tells, or clears such a gradient.
        for part in self._sharded_modules():
            whole = part._get_fsdp_state()
            for group in getattr(whole, "_fsdp_param_groups", None) or [whole._fsdp_param_group]:
                for state in group.fsdp_params if group else ():
                    gathered = getattr(state, "_unsharded_param", None)
                    if gathered is None:
                        continue
                    if gathered.grad is not None or state.unsharded_accumulated_grad is not None:
                        yield state._param_fqn or "?", state

    def _require_exchanged(self, caller: str) -> None:
        if names := [name for name, _ in self._unexchanged()]:
            raise RuntimeError(
                f"{caller}: expected gradients that were exchanged, got those of {listed(names)}, "
                "which were only added under no_sync; run the last backward of a step outside of "
                "it, or drop them with zero_grad_buffer()"
            )


def _mesh_of(
    groups: ProcessGroupCollection | None, mesh: DeviceMesh | None, device_type: str | None
) -> DeviceMesh:
    if groups is not None and mesh is not None:
        raise ValueError(
            "mesh: expected process_groups or mesh, got both; pass the one that names the ranks"
        )
    if mesh is not None:
        require_kind("mesh", mesh, DeviceMesh)
        return mesh
    if not dist.is_initialized():
        raise RuntimeError(
            "TorchFullyShardedDataParallel: expected a process group, got none; call "
            "torch.distributed.init_process_group first, on one rank too"
        )
    groups = groups or ProcessGroupCollection(dp_cp=dist.group.WORLD)
    return groups.data_parallel_mesh(device_type=device_type)


def _shard(part: nn.Module, **options: Any) -> None:
    """Shard `part`, whose parameters keep their attributes."""
    from torch.distributed.fsdp import fully_shard

    kept = {name: dict(vars(param)) for name, param in part.named_parameters()}
    fully_shard(part, **options)

    def give(*_: object) -> None:
        for name, attributes in kept.items():
            shown = vars(part.get_parameter(name))
            shown.update({key: attributes[key] for key in attributes if key not in shown})

    def give_once(*_: object) -> None:
        give()
        handle.remove()

    give()
    # To the gathered ones, which stay the same objects, after FSDP2's hook, which gathers.
    handle = part.register_forward_pre_hook(give_once)


@torch.no_grad()
def _take_own_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Put this rank's parts into `state`, a copy, in place of whole tensors and of those that are
    sharded otherwise (a collective for the latter).
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import distribute_tensor

    if isinstance(module, FSDPModule):
        module.reshard()  # a forward without gradients leaves the root's gathered
    params: dict[str, Any] = module._parameters
    for name, param in params.items():
        value = state.get(prefix + name)
        # A shape that differs is torch's to refuse.
        if value is None or not is_dtensor(param) or value.shape != param.shape:
            continue
        layout = param.device_mesh, param.placements
        if not is_dtensor(value) or (value.device_mesh, value.placements) != layout:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            # Every rank has the whole, so none is asked for it.
            state[prefix + name] = distribute_tensor(whole, *layout, src_data_rank=None)
