"""The models that the benches train: a Llama-like decoder whose blocks hold exactly nine tensors.

    block: attention_norm | query key value output | mlp_norm | gate up down (7 matrices, 2 vectors)
    root:  embedding | blocks | norm | head                                  (3 tensors of its own)

Sizes are counts of elements. Positions are told apart by the causal mask alone (no rotary
embedding): the benches time data parallelism, and every candidate trains the same model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TENSORS_A_BLOCK = 9


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of one decoder and of the batch it is timed with."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int

    def __post_init__(self) -> None:
        sizes = (self.layers, self.width, self.heads, self.hidden)
        if min(*sizes, self.vocabulary, self.sequence, self.batch) < 1:
            raise ValueError(
                f"every size of a decoder must be at least 1, got {self}; raise the smallest."
            )
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width {self.width} and heads "
                f"{self.heads}; change one of them."
            )

    @property
    def numel(self) -> int:
        """Parameters of the model: blocks, embedding, head and the last norm."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


# 25.95 M parameters, 104 MB in fp32: the case of the step-time comparison.
STEP_TIME_CONFIG = DecoderConfig(
    layers=8, width=512, heads=8, hidden=1408, vocabulary=256, sequence=128, batch=4
)
# A few thousand parameters: to try a bench, and to warm up a process.
TINY_CONFIG = DecoderConfig(
    layers=2, width=16, heads=2, hidden=32, vocabulary=32, sequence=8, batch=2
)


def host_cost_config(layers: int) -> DecoderConfig:
    """Tensors so small that the arithmetic of a block takes no time worth naming beside its Python
    and its dispatch.
    """
    return DecoderConfig(
        layers=layers, width=16, heads=2, hidden=32, vocabulary=32, sequence=4, batch=1
    )


def _norm(width: int) -> nn.LayerNorm:
    """A norm of one vector. Llama's RMS norm is a chain of small operators on a CPU, which would be
    a fifth of a step of tiny tensors; this one is a single operator.
    """
    return nn.LayerNorm(width, bias=False)


class Block(nn.Module):
    """Causal self-attention and a gated MLP, each behind a norm and added to its input.

    Tokens of all sequences lie in one dimension, [batch * sequence, width]: a matrix goes through
    `nn.Linear` without the views that more dimensions cost there.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.heads_shape = (-1, config.sequence, config.heads, width // config.heads)
        self.attention_norm = _norm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = _norm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape out as in."""
        heads = self.heads_shape
        normed = self.attention_norm(hidden)
        query = self.query(normed).view(heads).transpose(1, 2)
        key = self.key(normed).view(heads).transpose(1, 2)
        value = self.value(normed).view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(hidden.shape))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Tokens [batch, sequence] of int64 to the mean cross-entropy of `targets` (same shape), a 0-d
    float32 tensor.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch, in float32 whatever the logits are in."""
        hidden = self.embedding(tokens.flatten())
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.float(), targets.flatten())


def build_decoder(config: DecoderConfig, *, seed: int = 0) -> Decoder:
    """The same weights for the same seed, whatever was drawn from torch's generator before; the
    generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config)


def build_batch(config: DecoderConfig, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and the targets one position on, each int64 [batch, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch, config.sequence + 1)
    text = torch.randint(config.vocabulary, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
