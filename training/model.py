"""The model that the main job trains: a GPT over bytes, its named sizes and its seeded start.

    tokens [batch, length] -> embedding + position -> Block x num_layers -> LayerNorm -> head ->
    logits [batch, length, 256]

or, packed, one row of documents that see nothing of one another: tokens [1, total] -> logits [1,
total, 256].

`Block` is the communication unit that training hands to `fully_shard`; everything outside the
blocks is the root unit.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .packing import PackedSeqParams, packed_attention

VOCAB_SIZE = 256
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of one model; `context` is the longest sequence in bytes, `dropout` a probability."""

    num_layers: int
    width: int
    num_heads: int
    context: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        for name in ("num_layers", "width", "num_heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"expected {name} >= 1, got {getattr(self, name)}; pass a positive number"
                )
        if self.width % self.num_heads:
            raise ValueError(
                f"expected a width that num_heads divides, got width {self.width} and "
                f"{self.num_heads} heads; choose a multiple of {self.num_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"expected 0 <= dropout < 1, got {self.dropout}; pass 0 to switch it off"
            )


MODEL_SIZES = {
    "tiny": GPTConfig(num_layers=2, width=64, num_heads=2),
    "small": GPTConfig(num_layers=4, width=128, num_heads=4),
    "medium": GPTConfig(num_layers=8, width=512, num_heads=8),
    "large": GPTConfig(num_layers=12, width=768, num_heads=12),
}


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, packed: PackedSeqParams | None = None) -> Tensor:
        """Map [batch, length, width] to the same shape; position i sees positions <= i only, in a
        `packed` row, [1, total_tokens, width], those of its own document.
        """
        x = x + self._drop(self.attention_out(self._attend(self.attention_norm(x), packed)))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        return x + self._drop(self.mlp_out(hidden))

    def _attend(self, x: Tensor, packed: PackedSeqParams | None) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(
            batch, length, 3, self.num_heads, width // self.num_heads
        )
        dropout = self.dropout if self.training else 0.0
        if packed is not None:
            query, key, value = heads[0].unbind(1)  # each [total_tokens, heads, width / heads]
            mixed = packed_attention(query, key, value, packed, dropout_p=dropout)
            return mixed.reshape(batch, length, width)
        query, key, value = heads.permute(
            2, 0, 3, 1, 4
        )  # each [batch, heads, length, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Byte-level GPT with learned positions and a head of its own (not tied to the embedding)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCAB_SIZE, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, packed: PackedSeqParams | None = None) -> Tensor:
        """Map int64 tokens [batch, length] to logits [batch, length, 256] for the byte after each
        position; in a `packed` row, [1, total_tokens], positions start anew with each document.

        Raises:
            ValueError: the sequences or documents are longer than `config.context`, or the tokens
            are not those of `packed`.
        """
        longest = tokens.shape[1] if packed is None else packed.max_seqlen_q
        if longest > self.config.context:
            raise ValueError(
                f"expected at most {self.config.context} tokens, got {longest}; build the model "
                "with a longer context"
            )
        if packed is None:
            positions = torch.arange(longest, device=tokens.device)
        elif tokens.shape == (1, packed.total_tokens):
            positions = packed.position_ids
        else:
            raise ValueError(
                f"expected packed tokens [1, {packed.total_tokens}], got {list(tokens.shape)}; "
                "pass the params of this row"
            )
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, packed)
        return self.head(self.final_norm(x))


def model_config(size: str, *, context: int, dropout: float = 0.0) -> GPTConfig:
    """Return the named size with this context.

    Raises:
        ValueError: no size has this name, or the numbers make no model.
    """
    if size not in MODEL_SIZES:
        raise ValueError(
            f"expected a model size among {', '.join(MODEL_SIZES)}, got {size!r}; pass one of these"
        )
    return replace(MODEL_SIZES[size], context=context, dropout=dropout)


def build_model(config: GPTConfig, seed: int) -> GPT:
    """Return a model on the CPU in FP32 whose values follow from `seed` alone, so that every rank
    makes the same one.

    Weights are N(0, 0.02), those of the two projections into the residual stream N(0, 0.02 /
    sqrt(2 * num_layers)) so that its variance does not grow with depth; norms start at one, biases
    at zero. (Radford et al. 2019, section 2.3)
    """
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = (
                    residual_std
                    if name.endswith(("attention_out.weight", "mlp_out.weight"))
                    else INIT_STD
                )
                parameter.normal_(0.0, std, generator=generator)
    return model
