"""Lightning over a sharded model: train, clip, accumulate, save, resume, load without sharding.

python examples/lightning_strategy.py [FOLDER]                       one process
torchrun --nproc-per-node 2 examples/lightning_strategy.py [FOLDER]  two ranks, on CPU or GPUs

FOLDER gets the checkpoints.
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sidestream as ss
from sidestream.integrations.lightning import SidestreamStrategy


class Block(nn.Module):
    """A residual MLP: one communication unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] to the same shape."""
        return x + torch.tanh(self.linear(self.norm(x)))


class Regression(lightning.LightningModule):
    """Fits the sum of 8 numbers. Nothing in it knows of sharding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 1))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] to [batch, 1]."""
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss of a microbatch."""
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batch_size: int) -> DataLoader:
    """64 examples; Lightning shuffles them and gives each rank its part."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)


def fit(folder: str, strategy: object, checkpoint: str | None = None) -> Regression:
    """2 epochs in steps of 2 microbatches, a checkpoint after each epoch."""
    model = Regression()
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data(4), ckpt_path=checkpoint)
    return model


def main(folder: str) -> None:
    """Train; train again from the first epoch's checkpoint; compare the bits."""
    options = {"zero_dp_strategy": 3, "fsdp_unit_modules": [Block]}
    model = fit(folder, SidestreamStrategy(**options))
    weights = ss.full_state_dict(model)
    again = fit(folder, SidestreamStrategy(**options), f"{folder}/epoch=0.ckpt")
    resumed = ss.full_state_dict(again)
    same = all(torch.equal(weights[name], resumed[name]) for name in weights)
    plain = Regression.load_from_checkpoint(f"{folder}/epoch=1.ckpt", map_location="cpu")
    loaded = all(torch.equal(weights[name].cpu(), x) for name, x in plain.state_dict().items())
    if torch.distributed.get_rank() == 0:
        print("losses " + " ".join(f"{loss:.7f}" for loss in model.losses))
        print(f"resumed after the first epoch: same bits {same}")
        print(f"loaded without sharding from {folder}/epoch=1.ckpt: same bits {loaded}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints/lightning_strategy")
