"""What `sidestream train` can be told: its options, their checks, and which define a run."""

import argparse
import math
import os
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from .errors import OptionsError
from .model import MODEL_SIZES

COMPUTE_DTYPES = ("fp32", "bf16")
GRAD_WIRES = ("fp32", "bf16", "fp16", "fp8", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
PARAM_WIRES = ("fp32", "bf16", "fp16", "fp8", "fp8_1x128", "mxfp8", "nvfp4")
DEVICES = ("auto", "cpu", "cuda")
OUTER_STRATEGIES = ("no_shard", "optim")
MAX_COUNT = 2**31 - 1
MIN_HEARTBEAT_LIMIT_S = 3.0
MAX_SEED = 2**63 - 1  # what torch.Generator takes
COUNTS = (
    "steps",
    "batch",
    "seq_len",
    "accumulate",
    "nproc",
    "dp_outer",
    "ranks_per_node",
    "keep_checkpoints",
    "kill_at_step",
)
PATHS = ("data", "checkpoint", "json")
CKPT_FORMAT = "torch_dist"
# What FSDP2 has no choice of, and why.
NOT_OF_TORCH_FSDP2 = MappingProxyType(
    {
        "zero": "it shards parameters, gradients and state, as ZeRO-3 does",
        "outer_strategy": "its replicas share nothing",
        "ranks_per_node": "its backend chooses the way of a sum",
        "grad_wire": "it sums gradients in FP32 by its backend",
        "param_wire": "it gathers weights in the dtype of compute",
        "bucket_mib": "it exchanges units as a whole",
        "no_overlap": "it always overlaps",
    }
)

# A checkpoint resumes only a run that agrees in these: they decide the numbers, the others only
# how they are computed.
DEFINING_OPTIONS = frozenset(
    {
        "model",
        "seed",
        "steps",
        "batch",
        "seq_len",
        "accumulate",
        "lr",
        "clip",
        "dropout",
        "compute",
        "grad_wire",
        "param_wire",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One training run; `batch` counts the sequences of one optimizer step over all ranks and
    microbatches.
    """

    data: str | None = None
    model: str = "small"
    steps: int = 200
    batch: int = 16
    seq_len: int = 128
    accumulate: int = 1
    lr: float = 2e-3
    clip: float = 1.0
    dropout: float = 0.0
    seed: int = 0
    nproc: int | None = None
    device: str = "auto"
    zero: int = 3
    dp_outer: int = 1
    outer_strategy: str = "no_shard"
    ranks_per_node: int | None = None
    compute: str = "fp32"
    grad_wire: str = "fp32"
    param_wire: str | None = None
    bucket_mib: float | None = None
    no_overlap: bool = False
    use_torch_fsdp2: bool = False
    gradient_accumulation_fusion: bool = False
    heartbeat_limit_s: float = 20.0
    checkpoint: str | None = None
    ckpt_format: str = CKPT_FORMAT
    checkpoint_every: int = 0
    keep_checkpoints: int | None = None
    resume: bool = False
    json: str | None = None
    kill_at_step: int | None = None
    kill_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no run can use.

        Raises:
            OptionsError: a value outside its range, or an option without the one it needs.
        """
        for name in COUNTS:
            _require_between(name, getattr(self, name), 1, MAX_COUNT)
        for name in ("checkpoint_every", "kill_rank"):
            _require_between(name, getattr(self, name), 0, MAX_COUNT)
        _require_between("clip", self.clip, 0, math.inf)
        _require_between("seed", self.seed, 0, MAX_SEED)
        _require_between("heartbeat_limit_s", self.heartbeat_limit_s, 0, MAX_COUNT)
        for name in PATHS:
            if getattr(self, name) == "":
                raise OptionsError(
                    f"expected a path for {flag(name)}, got ''; name it or leave it out"
                )
        for name, known in (
            ("model", tuple(MODEL_SIZES)),
            ("device", DEVICES),
            ("zero", (0, 1, 2, 3)),
            ("outer_strategy", OUTER_STRATEGIES),
            ("compute", COMPUTE_DTYPES),
            ("grad_wire", GRAD_WIRES),
            ("param_wire", (None, *PARAM_WIRES)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise OptionsError(
                    f"expected {flag(name)} among {known}, got {value!r}; pass one of these"
                )
        if not 0 < self.lr < math.inf:
            raise OptionsError(
                f"expected a finite --lr > 0, got {self.lr}; pass a positive learning rate"
            )
        if not 0 <= self.dropout < 1:
            raise OptionsError(
                f"expected 0 <= --dropout < 1, got {self.dropout}; pass 0 to switch it off"
            )
        if self.bucket_mib is not None and not 0 < self.bucket_mib < math.inf:
            raise OptionsError(
                f"expected a finite --bucket-mib > 0, got {self.bucket_mib}; leave it out for one "
                "bucket a unit"
            )
        self._check_pairs()
        self._check_as_megatron()

    def _check_pairs(self) -> None:
        for name in ("resume", "checkpoint_every", "keep_checkpoints"):
            if self.checkpoint is None and getattr(self, name):
                raise OptionsError(
                    f"expected --checkpoint DIR beside {flag(name)}, got none; say where the "
                    "checkpoints are"
                )
        if self.heartbeat_limit_s and self.heartbeat_limit_s < MIN_HEARTBEAT_LIMIT_S:
            raise OptionsError(
                f"expected --heartbeat-limit-s >= {MIN_HEARTBEAT_LIMIT_S:g}, or 0 for never, got "
                f"{self.heartbeat_limit_s}; ranks beat once a second"
            )
        if self.outer_strategy != "no_shard" and self.dp_outer == 1:
            raise OptionsError(
                f"expected --dp-outer of at least 2 beside --outer-strategy {self.outer_strategy}, "
                "got 1; say how many replicas share the optimizer's state, or leave it out"
            )
        if self.kill_rank is not None and self.kill_at_step is None:
            raise OptionsError(
                "expected --kill-at-step beside --kill-rank, got none; say after which step"
            )

    def _check_as_megatron(self) -> None:
        if self.ckpt_format != CKPT_FORMAT:
            raise OptionsError(
                f"expected --ckpt-format {CKPT_FORMAT}, got {self.ckpt_format}: checkpoints are "
                "torch.distributed.checkpoint's, which any number of ranks can read, FSDP2's too; "
                f"pass {CKPT_FORMAT}, or leave it out"
            )
        if self.gradient_accumulation_fusion:
            reason = (
                "FSDP2 exchanges what autograd hands it, and a kernel that adds gradients to "
                "main_grad by itself hands it none"
                if self.use_torch_fsdp2
                else "no layer of this model has a kernel that adds to main_grad"
            )
            raise OptionsError(
                "expected --no-gradient-accumulation-fusion, got --gradient-accumulation-fusion: "
                f"{reason}; pass the former, or leave both out"
            )
        for name, reason in NOT_OF_TORCH_FSDP2.items():
            if self.use_torch_fsdp2 and getattr(self, name) != DEFAULTS[name]:
                raise OptionsError(
                    f"expected no {flag(name)} beside --use-torch-fsdp2, got "
                    f"{getattr(self, name)}: {reason}; leave one of them out"
                )

    def defining(self) -> dict[str, str | int | float]:
        """The options that decide the numbers of the run, by name, but for those left out."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name in DEFINING_OPTIONS and value is not None
        }


DEFAULTS = {field.name: field.default for field in fields(TrainOptions)}


def flag(name: str) -> str:
    """Return the command-line spelling of an option's name."""
    return "--" + name.replace("_", "-")


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option of `TrainOptions` on the parser, with the same defaults."""
    _add_run(parser.add_argument_group("the run"))
    _add_ranks(parser.add_argument_group("ranks and sharding"))
    _add_torch_fsdp2(parser.add_argument_group("PyTorch's own sharding"))
    _add_output(parser.add_argument_group("checkpoints and results"))
    _add_faults(parser.add_argument_group("faults, for tests"))


def options_from(namespace: argparse.Namespace) -> TrainOptions:
    """Return the options that a parser with `add_train_arguments` read.

    Raises:
        OptionsError: as `TrainOptions`.
    """
    values = {field.name: getattr(namespace, field.name) for field in fields(TrainOptions)}
    return TrainOptions(**values | {name: _expanded(name, values[name]) for name in PATHS})


def _expanded(name: str, path: str | None) -> str | None:
    """`path` with the home folder in place of `~`: a shell leaves it in --json=~/result.json."""
    expanded = None if path is None else os.path.expanduser(path)
    if expanded is not None and expanded.startswith("~"):
        raise OptionsError(
            f"expected the home folder of a user behind ~ in {flag(name)}, got {path}, which is "
            f"nobody's; for a file of this name pass ./{path}"
        )
    return expanded


def _add_run(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "data",
        "file or folder to train on (default: the standard library's sources)",
        metavar="PATH",
    )
    _add(group, "model", "size of the byte-level GPT", choices=tuple(MODEL_SIZES))
    _add(group, "steps", "optimizer steps", type=int, metavar="N")
    _add(
        group, "batch", "sequences per step, over all ranks and microbatches", type=int, metavar="N"
    )
    _add(group, "seq_len", "bytes per sequence", type=int, metavar="N")
    _add(group, "accumulate", "microbatches per step", type=int, metavar="N")
    _add(group, "lr", "peak learning rate of AdamW", type=float, metavar="X")
    _add(
        group,
        "clip",
        "largest gradient norm; 0 leaves gradients as they are",
        type=float,
        metavar="MAX_NORM",
    )
    _add(group, "dropout", "dropout probability", type=float, metavar="P")
    _add(group, "seed", "seed of weights, batches and dropout", type=int, metavar="N")


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "nproc",
        "ranks to start on this machine (default: one a GPU, else 1)",
        type=int,
        metavar="N",
    )
    _add(group, "device", "where to compute", choices=DEVICES)
    _add(group, "zero", "ZeRO level", type=int, choices=(0, 1, 2, 3))
    _add(
        group,
        "dp_outer",
        "replicas: so many groups of consecutive ranks, each of which shards the model",
        type=int,
        metavar="N",
    )
    _add(
        group,
        "outer_strategy",
        "what replicas shard between them: nothing, or the optimizer's state",
        choices=OUTER_STRATEGIES,
    )
    _add(
        group,
        "ranks_per_node",
        "sum gradients inside groups of so many ranks first, then between these "
        "(default: the ranks of a machine, where there are several)",
        type=int,
        metavar="N",
    )
    _add(group, "compute", "dtype of forward and backward", choices=COMPUTE_DTYPES)
    _add(group, "grad_wire", "format of gradients between ranks; sums are FP32", choices=GRAD_WIRES)
    _add(
        group,
        "param_wire",
        "format of gathered weights (default: that of compute)",
        choices=PARAM_WIRES,
    )
    _add(
        group,
        "bucket_mib",
        "split a unit's buffer into pieces of this size",
        type=float,
        metavar="X",
    )
    _add(group, "no_overlap", "communicate in line with the computation", action="store_true")
    _add(
        group,
        "heartbeat_limit_s",
        "end the run when a rank has not been heard of for this long; 0: never",
        type=float,
        metavar="SECONDS",
    )


def _add_torch_fsdp2(group: argparse._ArgumentGroup) -> None:
    _add(
        group,
        "use_torch_fsdp2",
        "let PyTorch's own FSDP2 shard the model and sum its gradients",
        action="store_true",
    )
    _add(
        group,
        "gradient_accumulation_fusion",
        "refused: kernels of layers add to gradients themselves",
        action=argparse.BooleanOptionalAction,
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    _add(group, "checkpoint", "folder of the checkpoints", metavar="DIR")
    _add(group, "ckpt_format", "format of the checkpoints; this is the only one", metavar="NAME")
    _add(
        group,
        "checkpoint_every",
        "save after every N steps; 0: after the last one",
        type=int,
        metavar="N",
    )
    _add(
        group,
        "keep_checkpoints",
        "remove all but the last K complete checkpoints (default: keep all)",
        type=int,
        metavar="K",
    )
    _add(group, "resume", "go on from the newest complete checkpoint in DIR", action="store_true")
    _add(group, "json", "also write the result to this file", metavar="FILE")


def _add_faults(group: argparse._ArgumentGroup) -> None:
    _add(group, "kill_at_step", "SIGKILL the rank itself right after step K", type=int, metavar="K")
    _add(group, "kill_rank", "only this rank (default: every rank)", type=int, metavar="R")


def _add(group: argparse._ArgumentGroup, name: str, help_text: str, **keywords: Any) -> None:
    default = DEFAULTS[name]
    shown = f" (default: {default})" if default not in (None, False) else ""
    group.add_argument(flag(name), default=default, help=help_text + shown, **keywords)


def _require_between(name: str, value: float | None, least: int, most: float) -> None:
    if value is None or least <= value <= most:
        return
    bound, fix = (f"<= {most}", "smaller") if value > most else (f">= {least}", "larger")
    raise OptionsError(f"expected {flag(name)} {bound}, got {value}; pass a {fix} number")
