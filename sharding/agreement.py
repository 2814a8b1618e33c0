"""Whether all ranks pass the same model and options to `fully_shard`, and how they differ."""

from __future__ import annotations

import hashlib

import torch

from .collectives import Collectives
from .partition import Signature


def check_ranks_agree(collectives: Collectives, signature: Signature, options: str) -> None:
    """Compare parameters (name, shape, dtype, requires_grad) and `options` with the other ranks.

    Raises:
        ValueError: they differ; on every rank, naming rank, parameter and both values.
    """
    digest = hashlib.sha256(repr((signature, options)).encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12)]
    values = torch.tensor(numbers, dtype=torch.int64)
    if collectives.all_equal(values, "comparison of the ranks' models"):
        return
    signatures = collectives.gather_objects(signature)
    all_options = collectives.gather_objects(options)
    problems = []
    for rank, (other, theirs) in enumerate(zip(signatures, all_options, strict=True)):
        problems += [
            f"rank {rank}: {difference}" for difference in _differences(signatures[0], other)
        ]
        if theirs != all_options[0]:
            problems.append(
                f"rank {rank}: fully_shard's options are {theirs}, on rank 0 {all_options[0]}"
            )
    raise ValueError(
        "fully_shard: expected the same model on every rank, compared with rank 0: "
        + "; ".join(problems)
    )


def _differences(expected: Signature, got: Signature) -> list[str]:
    ours = {entry[0]: entry[1:] for entry in got}
    theirs = {entry[0]: entry[1:] for entry in expected}
    found = [f"'{name}' is missing" for name in theirs if name not in ours]
    found += [f"'{name}' is unexpected" for name in ours if name not in theirs]
    found += [
        f"'{name}' has (shape, dtype, requires_grad) {ours[name]}, on rank 0 {theirs[name]}"
        for name in theirs
        if name in ours and ours[name] != theirs[name]
    ]
    return found or (["the parameters come in another order"] if expected != got else [])
