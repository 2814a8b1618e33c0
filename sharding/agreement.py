"""Whether all ranks pass the same model and options to `fully_shard`, and how they differ."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import torch

from ..kernels.tuned import Fingerprint
from .collectives import Collectives
from .modules.partition import Signature

_logger = logging.getLogger("sidestream")


def check_ranks_agree(
    collectives: Collectives,
    signature: Signature,
    options: Mapping[str, str],
    launches: Fingerprint,
) -> None:
    """Compare parameters (name, shape, dtype, requires_grad) and `options`, which have the same
    names everywhere, with the other ranks.

    How kernels are launched is compared as well. It changes no result, so where it differs rank 0
    only warns: all wait for the slowest.

    Raises:
        ValueError: they differ; on every rank, naming rank, parameter and both values.
    """
    digest = hashlib.sha256(repr((signature, options, launches.digest)).encode()).digest()
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
        problems += [
            f"rank {rank}: {name} is {value}, on rank 0 {all_options[0][name]}"
            for name, value in theirs.items()
            if value != all_options[0][name]
        ]
    if not problems:
        gathered = collectives.gather_objects(launches)
        if collectives.rank == 0:
            _warn_of_launches(gathered)
        return
    raise ValueError(
        "fully_shard: expected the same model and options on every rank, compared with rank 0: "
        + "; ".join(problems)
    )


def _warn_of_launches(launches: Sequence[Fingerprint]) -> None:
    """launches: those of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(launches):
        ranks.setdefault(found.digest, []).append(rank)
    texts = []
    for same in ranks.values():
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        texts.append(f"rank {same[0]}{more}: {launches[same[0]].words}")
    _logger.warning(
        "fully_shard: expected one table of tuned kernel launches on all ranks, got several, which "
        "changes no result but lets fast ranks wait; give all ranks the same files: %s",
        "; ".join(texts),
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
