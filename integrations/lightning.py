"""Lightning's Trainer over a sharded model: a Strategy.

    Trainer(strategy=SidestreamStrategy(zero_dp_strategy=3, fsdp_unit_modules=[Block]), ...)

The LightningModule is sharded as a whole after `configure_model`, and `configure_optimizers` sees
its sharded parameters, so that any number of elementwise optimizers and their schedulers will do.
The four steps (`training_step` and so on) gather parameters as `forward` does.

A checkpoint is two things, and one that lacks the second is for evaluation only::

    last.ckpt              Lightning's own file with whole weights, for any strategy and for
                           load_from_checkpoint; without optimizer states
    last.ckpt.sidestream/  optimizer-0, ... as `save_checkpoint` writes them; at any world size

All ranks take part in a step, a validation and a save: one that acts alone waits for the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..sharding import (
    full_state_dict,
    fully_shard_model,
    fully_shard_optimizer,
    is_sharded,
    load_checkpoint,
    no_sync,
    register_forward_method,
    save_checkpoint,
    shorten_flight_record,
    summary,
)

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        f"sidestream.integrations.lightning: expected lightning, got '{error}'; "
        "pip install 'sidestream[examples]'"
    ) from error

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class SidestreamStrategy(DDPStrategy):
    """Launches and connects ranks as DDPStrategy does, and shards where that wraps.

    Args:
        process_group_backend, timeout: DDPStrategy's.
        **sharding: options of `fully_shard_model`, and `elementwise`, which vouches for the
            optimizers.
    """

    model: Any

    def __init__(
        self, *, process_group_backend: str | None = None, timeout: Any = None, **sharding: Any
    ) -> None:
        options = {} if timeout is None else {"timeout": timeout}
        super().__init__(process_group_backend=process_group_backend, **options)
        self._elementwise = sharding.pop("elementwise", False)
        self._sharding = sharding
        self._resumes: Path | None = None

    def setup_environment(self) -> None:
        """Join the other ranks."""
        shorten_flight_record()
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Shard the model, once, and bind the optimizers that it configures."""
        self.accelerator.setup(trainer)
        if not is_sharded(self.model):
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
            fully_shard_model(self.model, **self._sharding)
            for step in _STEPS:
                register_forward_method(self.model, step)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers over the sharded parameters."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            fully_shard_optimizer(optimizer, elementwise=self._elementwise)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a sampler shares data among the ranks, each of which gets its own.

        Raises:
            ValueError: the model is sharded over some of the ranks, and others need the same data.
        """
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs
        if (found := summary(self.model).world_size) != kwargs["num_replicas"]:
            raise ValueError(
                f"device_mesh: expected data-parallel dimensions of all {kwargs['num_replicas']} "
                f"ranks, among which Lightning shares the data, got {found}; pass "
                "Trainer(use_distributed_sampler=False), and a sampler that gives ranks of one "
                "data-parallel place the same data"
            )
        return kwargs

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let the backwards inside, of microbatches before the last, only accumulate."""
        with no_sync(self.model):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on every rank (a collective)."""
        return full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` saves it in shards."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save Lightning's file, and first what it lacks, unless it holds weights only."""
        path = Path(self.broadcast(filepath))
        if checkpoint.pop("optimizer_states", None) is not None:
            checkpoint["optimizer_states"] = []
            for folder, optimizer in self._folders(path):
                save_checkpoint(folder, self.model, optimizer, checkpoint["global_step"])
        super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the file and what belongs to it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_shards_of(Path(filepath)), ignore_errors=True)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read into the sharded model."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Lightning's file; where it lies is where `load_optimizer_state_dict` looks."""
        self._resumes = Path(self.broadcast(checkpoint_path))
        return super().load_checkpoint(self._resumes, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what `save_checkpoint` saved beside Lightning's file.

        Raises:
            ValueError: it is another strategy's file, or was saved of another step.
            FileNotFoundError: the folder beside the file is gone.
        """
        assert self._resumes is not None
        if checkpoint["optimizer_states"]:
            raise ValueError(
                f"ckpt_path: expected a checkpoint of SidestreamStrategy, got {self._resumes}, "
                "which another strategy wrote with optimizer states of its own; load its weights "
                "with load_from_checkpoint and fit without ckpt_path"
            )
        for folder, optimizer in self._folders(self._resumes):
            step = load_checkpoint(folder, self.model, optimizer)
            if step != checkpoint["global_step"]:
                raise ValueError(
                    f"ckpt_path: expected {folder} of step {checkpoint['global_step']} like the "
                    f"file beside it, got step {step}: saving was interrupted; resume from another"
                )

    def teardown(self) -> None:
        """Leave the ranks; the model stays sharded, on its device."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _folders(self, path: Path) -> list[tuple[Path, Any]]:
        """Every optimizer, and where its state lies."""
        return [
            (_shards_of(path) / f"optimizer-{number}", optimizer)
            for number, optimizer in enumerate(self.optimizers)
        ]


def _shards_of(path: Path) -> Path:
    """The folder beside Lightning's file, also beside that which a link stands for."""
    return Path(f"{path.resolve()}.sidestream")
