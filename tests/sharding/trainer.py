"""A small training job for the tests: the same model, data and optimizer, sharded in any way or not
at all.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import sidestream as ss

VOCABULARY = 19
WIDTH = 12
SAMPLES_PER_STEP = 12  # divides by every world size that is tested


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias: a key bias has gradient zero but for rounding, which Adam would blow up to full
        # steps.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 31)
        self.down = nn.Linear(31, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = MLP()
        self.gain = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.gain * self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


UNIT_CLASSES: dict[str, Any] = {
    "whole": None,
    "block": [Block],
    "fine": [Attention, MLP],
}


@dataclass(frozen=True)
class Job:
    zero: int | None = 3  # None: plain PyTorch, the whole batch
    steps: int = 4
    units: str = "block"
    optimizer_first: bool = True
    accumulate: int = 1
    clip: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Job":
        return replace(self, **changes)


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    sha256: str
    params: dict[str, Tensor]
    calls: dict[str, int]
    sent_bytes: dict[str, int]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def build(job: Job, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of `job`, sharded unless `job.zero` is None."""
    torch.manual_seed(seed)
    model = Transformer()
    if job.zero is None:
        return model, make_optimizer(model)
    options: dict[str, Any] = {
        "zero_dp_strategy": job.zero,
        "fsdp_unit_modules": UNIT_CLASSES[job.units],
        "mixed_precision_policy": ss.MixedPrecisionPolicy(**job.policy),
        **job.options,
    }
    if job.optimizer_first:
        optimizer = make_optimizer(model)
        ss.fully_shard(model, optimizer, **options)
    else:
        ss.fully_shard_model(model, **options)
        optimizer = ss.fully_shard_optimizer(make_optimizer(model))
    return model, optimizer


def batch(
    step: int, microbatch: int = 0, num_microbatches: int = 1, rank: int = 0, world_size: int = 1
) -> Tensor:
    """This rank's tokens of one microbatch; all ranks' and microbatches' together are the step's
    samples.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES_PER_STEP, 8), generator=generator)
    share = SAMPLES_PER_STEP // (world_size * num_microbatches)
    start = (microbatch * world_size + rank) * share
    return tokens[start : start + share]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1].float()
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def run_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, step: int, rank: int, world: int
) -> float:
    """One optimizer step; returns this rank's mean loss."""
    total = 0.0
    for microbatch in range(job.accumulate):
        tokens = batch(step, microbatch, job.accumulate, rank, world)
        loss = loss_of(model, tokens) / job.accumulate
        if job.zero is not None and microbatch + 1 < job.accumulate:
            with ss.no_sync(model):
                loss.backward()
        else:
            loss.backward()
        total += loss.item()
    return total


def full_params(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank."""
    return {
        name: (param.full_tensor() if isinstance(param, ss.ShardedTensor) else param)
        .detach()
        .clone()
        for name, param in model.named_parameters()
    }


def sha256_of(params: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(params[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(rank: int, world_size: int, job: Job) -> Outcome:
    """Train `job` on this rank and return what it came to."""
    if job.zero is None:
        rank, world_size = 0, 1
    model, optimizer = build(job, seed=0 if job.zero is None else rank)
    losses, norms = [], []
    for step in range(job.steps):
        losses.append(run_step(model, optimizer, job, step, rank, world_size))
        if job.clip is not None and job.zero is None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), job.clip).item())
        elif job.clip is not None:
            norms.append(ss.clip_grad_norm_(model, job.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    calls: dict[str, int] = {}
    sent: dict[str, int] = {}
    if job.zero is not None:
        from sidestream.sharding.fully_shard import runtime_of

        traffic = runtime_of(model).collectives.traffic
        calls, sent = dict(traffic.calls), dict(traffic.sent_bytes)
    params = full_params(model)
    return Outcome(losses, norms, sha256_of(params), params, calls, sent)


def run_all(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[str, Outcome]:
    """Several jobs one after the other in the same processes."""
    return {name: run(rank, world_size, job) for name, job in jobs.items()}
