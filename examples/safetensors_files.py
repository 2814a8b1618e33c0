"""Weights out of a sharded model into safetensors files, and back into another one.

python examples/safetensors_files.py [FOLDER]                       one process
torchrun --nproc-per-node 2 examples/safetensors_files.py [FOLDER]  two ranks, on CPU or GPUs

The files hold whole tensors under the plain model's names, in the layout of the Hugging Face hub:
any tool reads them, `from_pretrained` too, and any world size.
"""

import os
import sys

import torch
from torch import nn

import sidestream as ss


class Block(nn.Module):
    """A residual MLP: one communication unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same shape."""
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Embedding, blocks, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [...] to logits [..., 64]."""
        return self.head(self.blocks(self.embedding(tokens)))


def build_model(seed: int) -> nn.Module:
    """A model with the weights of `seed`."""
    torch.manual_seed(seed)
    return Model()


def main(folder: str) -> None:
    """Train a step, export, import into another model, compare what both compute."""
    model = build_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ss.fully_shard(model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=3)
    device = next(model.parameters()).device
    tokens = torch.arange(16, device=device)
    nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
    optimizer.step()
    ss.save_safetensors(folder, model)

    other = ss.fully_shard_model(build_model(1), fsdp_unit_modules=[Block], zero_dp_strategy=2)
    ss.load_safetensors(folder, other)
    with torch.no_grad():
        same = torch.equal(other(tokens), model(tokens))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"exported to {', '.join(sorted(os.listdir(folder)))} in {folder}")
        print(f"imported into another sharded model: same outputs {same}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "checkpoints/safetensors_files")
