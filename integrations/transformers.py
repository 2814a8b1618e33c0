"""The Trainer of transformers over a sharded model: prepare, clip, accumulate, save, resume.

What the Trainer does, and where it is changed::

    create_optimizer               then fully_shard(model, optimizer), then accelerate is told
    training_step                  microbatches before the last run under no_sync
    _clip_grad_norm                sidestream.clip_grad_norm_, the same bits on every rank
    _save                          whole weights, as from_pretrained reads them
    _save_optimizer_and_scheduler  save_checkpoint to checkpoint-N/sidestream, at any world size
    _load_optimizer_and_scheduler  load_checkpoint from there

The rest is the Trainer's own: data, logging, evaluation, callbacks, PEFT. All ranks call `train`,
`evaluate`, `predict` and `save_model`: one that calls alone waits for the others.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..sharding import (
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    is_sharded,
    load_checkpoint,
    no_sync,
    save_checkpoint,
    summary,
)

try:
    from transformers import Trainer
    from transformers.trainer import SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "sidestream.integrations.transformers: expected transformers with accelerate, got "
        f"'{error}'; pip install 'sidestream[examples]'"
    ) from error

FOLDER = "sidestream"
"""Below a checkpoint's folder: weights and optimizer state, as `load_checkpoint` reads them."""


class SidestreamTrainerMixin:
    """What makes a Trainer shard; put it before any subclass of Trainer among the bases.

    Args:
        sharding: options of `fully_shard`. Without fsdp_unit_modules, the units are the layers
            that the model names in `_no_split_modules`.
        *args, **kwargs: the Trainer's own; its model is not sharded yet.

    Raises:
        ValueError: arguments that ask for another way to distribute the model, for DataParallel,
            or for what would run on some ranks only.
    """

    model: nn.Module
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, sharding: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        model = args[0] if args else kwargs.get("model")
        if isinstance(model, nn.Module) and is_sharded(model):
            raise ValueError(
                "model: expected one that is not sharded yet, got a sharded one; pass the plain "
                "model, and the options of fully_shard as sharding="
            )
        self._sharding = dict(sharding or {})
        super().__init__(*args, **kwargs)
        _check_arguments(self.args)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer as the Trainer does, and shard the model with it, once."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        if not is_sharded(self.model):
            layers = getattr(self.model, "_no_split_modules", None) or None
            options = {"fsdp_unit_modules": layers, **self._sharding}
            fully_shard(self.model, optimizer, **options)
            self._require_all_ranks()
            # Autocast, and the mark by which `accelerator.prepare` leaves the model as it is.
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            # transformers' own mark: `generate` and layer dropping keep the ranks in step.
            self.model._is_fsdp_managed_module = True  # type: ignore[assignment]
        return optimizer

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one microbatch; only the last one's backward communicates."""
        last = self.accelerator.sync_gradients
        with contextlib.nullcontext() if last else no_sync(self.model):
            loss: Tensor = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
            return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return clip_grad_norm_(self.model, math.inf) if grad_norm is None else grad_norm

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if state_dict is None and is_sharded(self.model):
            state_dict = full_state_dict(self.model)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(Path(output_dir, FOLDER), self.model, self._plain_optimizer())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint, FOLDER)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"resume_from_checkpoint: expected {folder}, which this Trainer saves, got none: "
                f"{checkpoint} is of another Trainer or was saved with save_only_model; load its "
                "weights with from_pretrained, and train without resume_from_checkpoint"
            )
        load_checkpoint(folder, self.model, self._plain_optimizer())
        scheduler = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _require_all_ranks(self) -> None:
        if (found := summary(self.model).world_size) != self.args.world_size:
            raise ValueError(
                f"sharding: expected a device_mesh whose data-parallel dimensions have all "
                f"{self.args.world_size} ranks, since the Trainer gives each of them other data, "
                f"got {found}; make the mesh of these dimensions alone"
            )

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that `fully_shard` bound, without accelerate's wrapper."""
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer


class SidestreamTrainer(SidestreamTrainerMixin, Trainer):
    """The Trainer of transformers, sharded: `SidestreamTrainer(model, args, sharding={...})`.

    `sharding` holds options of `fully_shard`, such as `{"zero_dp_strategy": 3}`; all other
    arguments are the Trainer's. For another Trainer, such as Seq2SeqTrainer or those of trl:
    `class MyTrainer(SidestreamTrainerMixin, Seq2SeqTrainer): ...`.
    """


def _check_arguments(args: Any) -> None:
    """Refuse what SidestreamTrainer's docstring says."""
    refused = {
        "fsdp": (bool(args.fsdp), "leave it out"),
        "deepspeed": (bool(args.deepspeed), "leave it out"),
        "torch_compile": (args.torch_compile, "compile the model's layers with layer.compile()"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "one rank that starts over leaves the others waiting; choose the batch size",
        ),
    }
    for name, (is_set, fix) in refused.items():
        if is_set:
            raise ValueError(
                f"{name}: expected it unset in the arguments of a Trainer that sharded training "
                f"takes over, got {getattr(args, name)!r}; {fix}"
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one process for each GPU, got one for {args.n_gpu}, which the Trainer would "
            "use by DataParallel; start with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.world_size:
        raise ValueError(
            f"expected TrainingArguments that know of all {started} ranks, got {args.world_size}; "
            "on a machine without GPUs pass TrainingArguments(use_cpu=True)"
        )
