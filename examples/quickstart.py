"""The quick start of the README: any PyTorch model, sharded in one line.

python examples/quickstart.py                                  one process
torchrun --nproc-per-node 2 examples/quickstart.py             two ranks, on CPU or GPUs
"""

import torch
from torch import nn

import sidestream as ss


class Block(nn.Module):
    """A residual MLP: one communication unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] to the same shape."""
        return x + self.mlp(self.norm(x))


def main() -> None:
    """Fit a fixed random function for a few steps."""
    model = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ss.fully_shard(
        model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=3
    )
    print(ss.summary(model))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    device = next(model.parameters()).device
    for step in range(20):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        x = x.to(device)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True) / 8)
        loss.backward()
        ss.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    ss.save_checkpoint("checkpoints/quickstart", model, optimizer)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
