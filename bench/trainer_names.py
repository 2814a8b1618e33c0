"""The names of the trainers that the benches compare; `rivals` tells what each is.

They stand apart because the parsers of commands need no more, and importing the rivals takes long.
"""

PLAIN, FSDP2, MEGATRON_FSDP = "plain", "fsdp2", "megatron_fsdp"
TRAINER_NAMES: tuple[str, ...] = (
    PLAIN,
    "ddp",
    "ddp_zero1",
    FSDP2,
    "fsdp2_tuned",
    MEGATRON_FSDP,
    *(f"zero{level}" for level in range(4)),
    "buckets",
)
# The rivals of `bench network`; ours are named there by what travels.
NETWORK_RIVALS = (PLAIN, "ddp", "ddp_bf16", FSDP2, "fsdp2_bf16", "fsdp2_tuned")
