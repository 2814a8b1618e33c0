"""AdamW that updates flat shards in one pass, and their compute-dtype copies with them.

    memory of a parameter           updated by                          a step launches
    FP32, on a GPU                  `kernels.flat_adamw_`               1 a parameter
    other, on a GPU, or amsgrad     torch's fused operator              1 for many, 1 a copy
    on a CPU                        torch's fused operator              1 for many, 1 a copy

Step counters lie beside their parameters and learning rates are read there: no host waits for a
device, so a CUDA graph may hold a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from ...kernels import flat_adamw_
from ...kernels.op import launches
from .flat_runs import CACHED_RUN_NUMEL

_STATED = {"fused": (None, True), "foreach": (None, False), "differentiable": (None, False)}
"""Options of torch's that say how it computes, and what they may be here."""


@dataclass(slots=True)
class ComputeShards:
    """Where a step writes what it makes of parameters in compute dtype too, [numel] by flat
    parameter; `written` once it has, for all that it changed.
    """

    of: Mapping[Tensor, Tensor]
    written: bool = False


@dataclass(slots=True)
class _Update:
    """What a step reads and writes of one parameter, all of its shape but `step`, a counter."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor
    copy: Tensor | None


@dataclass(frozen=True, slots=True)
class _Scaling:
    """What a `GradScaler` says: what gradients were multiplied by, and 1 if one is not finite."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, with its options, its state and its state dicts, over flat shards or
    plain parameters.

    On a CPU its bits are those of `torch.optim.AdamW(fused=True)`, on a GPU those that
    `sidestream.kernels.flat_adamw_` defines, within an ulp a step of torch's. Where parameters are
    kept between steps in another dtype than the main ones (ZeRO-0 to 2, and HFSDP), a step writes
    those too, and the next gather has none to cast.

    A `torch.amp.GradScaler` may scale the loss; what a step that unscales gradients leaves in them
    is not defined.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as `torch.optim.AdamW` takes them;
            `lr` may be a tensor of one element.
        capturable: as it pleases; every step is.
        foreach, differentiable, fused: None or False, False, and None or True: it is always fused.

    Raises:
        ValueError: another value of the last three, of a group's too; those of torch.
        RuntimeError: in `step`, before anything changes: a gradient that is sparse, or of a
            parameter that is no floating-point one.
    """

    _step_supports_amp_scaling = True
    compute_shards: ComputeShards | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _require_fused({"foreach": foreach, "differentiable": differentiable, "fused": fused})
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=True,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict brings the options of who made it
            group.update(fused=True, foreach=None, differentiable=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; raises `ValueError` for options that the class refuses."""
        if isinstance(param_group, dict):
            _require_fused(param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; calls `closure` first, if there is one, and returns what it returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _require_dense(self.param_groups)
        shards = self.compute_shards
        copies = {} if shards is None else shards.of
        scaling = _Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        for group in self.param_groups:
            updates = [
                self._update_of(param, group["amsgrad"], copies.get(param))
                for param in group["params"]
                if param.grad is not None
            ]
            if updates:
                _apply(updates, group, scaling)
        if shards is not None:
            shards.written = True
        return loss

    def _update_of(self, param: Tensor, amsgrad: bool, copy: Tensor | None) -> _Update:
        state = self.state[param]
        entries = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
        for entry in entries:
            if entry not in state:
                state[entry] = torch.zeros_like(param, memory_format=torch.preserve_format)
        # Others keep it as a number, on the host, or in another dtype.
        step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=param.device)
        state["step"] = step
        assert param.grad is not None
        return _Update(
            param,
            param.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["max_exp_avg_sq"] if amsgrad else None,
            step,
            copy,
        )


def _require_fused(options: Mapping[str, Any]) -> None:
    for name, allowed in _STATED.items():
        if name in options and options[name] not in allowed:
            raise ValueError(
                f"{name}: expected {' or '.join(map(str, allowed))}, got {options[name]!r}: "
                "sidestream.AdamW is always fused; leave it out, or take torch.optim.AdamW"
            )


def _require_dense(groups: Iterable[Mapping[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            if not param.is_floating_point() or param.grad.layout is not torch.strided:
                raise RuntimeError(
                    "AdamW.step: expected floating-point parameters with dense gradients, got "
                    f"{param.dtype} with a {param.grad.layout} gradient at param_groups[{number}]"
                    f"['params'][{position}], shape {tuple(param.shape)}; make the gradients "
                    "dense, as nn.Embedding(sparse=False) does, or take another optimizer"
                )


def _apply(updates: Sequence[_Update], group: Mapping[str, Any], scaling: _Scaling) -> None:
    """Step the parameters of one group."""
    # The operators leave no trace of what they write, which graphs and gathers go by.
    increment_version([update.param for update in updates])
    torch._foreach_add_([update.step for update in updates], 1)
    places: dict[tuple[torch.device, bool], list[_Update]] = {}
    for update in updates:
        places.setdefault((update.param.device, _fits_kernel(update)), []).append(update)
    for (device, fits_kernel), here in places.items():
        scaled = _Scaling(_on(device, scaling.grad_scale), _on(device, scaling.found_inf))
        options = {**group, "lr": _on(device, group["lr"])}
        (_step_by_kernel if fits_kernel else _step_by_torch)(here, options, scaled)
        if scaled.found_inf is not None:
            torch._foreach_sub_([update.step for update in here], [scaled.found_inf] * len(here))


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _fits_kernel(update: _Update) -> bool:
    """Whether the kernel takes it, where kernels are launched at all."""
    shards = (update.param, update.grad, update.exp_avg, update.exp_avg_sq)
    return (
        launches(update.param.device, *shards)
        and update.max_exp_avg_sq is None
        and all(shard.dtype is torch.float32 and shard.is_contiguous() for shard in shards)
    )


def _step_by_kernel(
    updates: Sequence[_Update], options: Mapping[str, Any], scaling: _Scaling
) -> None:
    lr, device = options["lr"], updates[0].param.device
    if not isinstance(lr, Tensor):  # filled by a launch: a host may wait for a copy
        lr = torch.full((), float(lr), dtype=torch.float64, device=device)
    lr = lr.double()
    factor = None if scaling.grad_scale is None else scaling.grad_scale.float().reciprocal()
    beta1, beta2 = map(float, options["betas"])
    for update in updates:
        flat_adamw_(
            update.param.view(-1),
            update.grad.view(-1),
            update.exp_avg.view(-1),
            update.exp_avg_sq.view(-1),
            lr,
            update.step,
            betas=(beta1, beta2),
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            maximize=options["maximize"],
            factor=factor,
            found_inf=scaling.found_inf,
            compute=update.copy,
        )


def _step_by_torch(
    updates: Sequence[_Update], options: Mapping[str, Any], scaling: _Scaling
) -> None:
    beta1, beta2 = map(float, options["betas"])
    for batch in _batches(updates):
        torch._fused_adamw_(
            [update.param for update in batch],
            [update.grad for update in batch],
            [update.exp_avg for update in batch],
            [update.exp_avg_sq for update in batch],
            [u.max_exp_avg_sq for u in batch if u.max_exp_avg_sq is not None],
            [update.step for update in batch],
            amsgrad=options["amsgrad"],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
            grad_scale=scaling.grad_scale,
            found_inf=scaling.found_inf,
        )
        for update in batch:
            if update.copy is not None:
                update.copy.copy_(update.param)


def _batches(updates: Sequence[_Update]) -> Iterator[list[_Update]]:
    """Updates of one dtype each, on a CPU cut so that copies read what a cache still holds."""
    limit = CACHED_RUN_NUMEL if updates[0].param.is_cpu else math.inf
    by_dtype: dict[torch.dtype, list[_Update]] = {}
    for update in updates:
        by_dtype.setdefault(update.param.dtype, []).append(update)
    for alike in by_dtype.values():
        batch, numel = [], 0
        for update in alike:
            batch.append(update)
            numel += update.param.numel()
            if numel >= limit:
                yield batch
                batch, numel = [], 0
        if batch:
            yield batch
