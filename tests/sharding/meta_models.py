"""Models that start on the meta device, and functions that initialise them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sidestream.training.model import GPT, model_config


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The module that `make` makes, without values."""
    with torch.device("meta"):
        return make()


def gpt() -> GPT:
    """That of the main job, its smallest."""
    return GPT(model_config("tiny", context=16))


class Tied(nn.Module):
    """The head takes the embedding's weight after it was made with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scale(nn.Module):
    """Nothing resets it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("angles", torch.arange(width) / width, persistent=False)
        self.register_buffer("order", torch.arange(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        return x * self.scale * self.angles


class Custom(nn.Module):
    """Units of a module that has no reset, under a tied root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Scale(4)) for _ in range(2))
        self.head = nn.Linear(4, 6, bias=False)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def set_own(module: nn.Module) -> None:
    """Set what `module` of a `Custom` has itself."""
    if isinstance(module, Scale):
        nn.init.normal_(module.scale, 1.0, 0.1)
        module.angles = torch.arange(len(module.scale)) / 7
        module.order.copy_(torch.arange(len(module.scale)))
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        # As some models have it, past the version counters.
        module.weight.data.normal_(0.0, 0.02)
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
