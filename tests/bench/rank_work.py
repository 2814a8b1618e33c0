"""What the ranks of test_bench_ranks.py do; in a file that a spawned process can import by name."""

import os
import time

import torch
import torch.distributed as dist


def add_up(rank: int, argument: int) -> tuple[int, float, int]:
    total = torch.tensor([float(rank + argument)])
    dist.all_reduce(total)
    return rank, total.item(), torch.get_num_threads()


def fail_last(rank: int, argument: str) -> None:
    if rank == dist.get_world_size() - 1:
        raise KeyError(argument)
    dist.barrier()


def die_last(rank: int, argument: int) -> None:
    if rank == dist.get_world_size() - 1:
        os._exit(argument)
    dist.barrier()


def sleep_last(rank: int, argument: float) -> None:
    if rank == dist.get_world_size() - 1:
        time.sleep(argument)
    dist.barrier()


def speak_and_sleep(rank: int, argument: float) -> None:
    print(f"rank {rank}", flush=True)
    time.sleep(argument)
