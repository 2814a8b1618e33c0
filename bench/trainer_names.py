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

# Of `bench network`: the rivals, and what ours can send of gradients and of weights.
NETWORK_RIVALS = (PLAIN, "ddp", "ddp_bf16", FSDP2, "fsdp2_bf16", "fsdp2_tuned")
GRAD_WIRES = ("fp32", "bf16", "fp16", "fp8", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
PARAM_WIRES = ("fp32", "bf16", "fp8", "mxfp8", "nvfp4")
