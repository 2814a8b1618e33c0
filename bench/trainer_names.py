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
)
