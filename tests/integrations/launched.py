"""Makes the ranks of a test look to other packages as if torchrun had started them."""

import logging
import os
import warnings


def as_if_launched(rank: int, world_size: int, port: int = 1) -> None:
    """Set what torchrun sets. `port`, of the first rank, is for who has no process group yet."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        TORCHELASTIC_RUN_ID="test",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    warnings.simplefilter("ignore")  # those of other packages
    logging.disable(logging.INFO)
