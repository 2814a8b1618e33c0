"""A GPT trained through the names of Megatron-Core: process groups, DistributedDataParallel in
buckets, a distributed optimizer in two instances, gradients finalised by the number of tokens.

torchrun --nproc-per-node 4 examples/megatron_training.py    tp=1, dp = 2 x 2 instances
torchrun --nproc-per-node 2 examples/megatron_training.py    dp = 1 x 2 instances
"""

import torch
import torch.distributed as dist
from torch import Tensor

import sidestream as ss
from sidestream.training.model import build_model, model_config

STEPS, MICROBATCHES, ROWS, CONTEXT = 30, 2, 8, 32
LEARNING_RATE, MAX_NORM = 3e-3, 1.0


def batch(step: int, microbatch: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from a random byte [rows, context], and the bytes after them."""
    seed = (step * MICROBATCHES + microbatch) * world_size + rank
    first = torch.randint(256, (ROWS, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (first + torch.arange(CONTEXT + 1)) % 256
    return tokens[:, :-1], tokens[:, 1:]


def summed_loss(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Over all tokens: what divides it is known when all ranks have counted theirs."""
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


def main() -> None:
    """Train, and print the mean loss of rank 0."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    parallel = ss.ModelParallelConfig(tensor_model_parallel_size=1)
    groups = ss.initialize_model_parallel(**parallel.sizes(), num_distributed_optimizer_instances=2)
    config = ss.DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=50_000,
        calculate_per_token_loss=True,
        check_for_nan_in_grad=True,
    )
    gpt = build_model(model_config("tiny", context=CONTEXT), seed=0)
    model = ss.DistributedDataParallel(gpt, config, groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ss.fully_shard_optimizer(optimizer)
    if rank == 0:
        print(ss.summary(model.module))
    device = next(model.parameters()).device
    for step in range(STEPS):
        tokens_seen, total = 0, 0.0
        for microbatch in range(MICROBATCHES):
            tokens, targets = batch(step, microbatch, rank, dist.get_world_size())
            tokens, targets = tokens.to(device), targets.to(device)
            loss = summed_loss(model, tokens, targets)
            if microbatch + 1 < MICROBATCHES:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
            tokens_seen += targets.numel()
            total += loss.item()
        ss.finalize_model_grads(model, tokens_seen)
        ss.clip_grad_norm_(model.module, MAX_NORM)
        optimizer.step()
        model.zero_grad_buffer()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {total / tokens_seen:.4f}")
    groups.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
