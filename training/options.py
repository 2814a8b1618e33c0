"""What `sidestream train` can be told: a table of its options, and what two of them exclude."""

import argparse
import math
from dataclasses import asdict, dataclass
from types import MappingProxyType

from .errors import OptionsError
from .model import MODEL_SIZES
from .option_fields import (
    MAX_COUNT,
    add_arguments,
    check_each,
    count,
    flag,
    option,
    options_of,
    values_from,
)
from .schedule_options import RUN, SCHEDULES, ScheduleOptions

COMPUTE_DTYPES = ("fp32", "bf16")
GRAD_WIRES = ("fp32", "bf16", "fp16", "fp8", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
PARAM_WIRES = ("fp32", "bf16", "fp16", "fp8", "fp8_1x128", "mxfp8", "nvfp4")
MIN_HEARTBEAT_LIMIT_S = 3.0
MAX_SEED = 2**63 - 1  # what torch.Generator takes
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
        "graph": "its exchanges are not recorded",
    }
)
RANKS, FSDP2 = "ranks and sharding", "PyTorch's own sharding"
OUTPUT, MEASURES = "checkpoints and results", "measures"
FAULTS = "faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(ScheduleOptions):
    """One training run; `batch` counts the sequences of one optimizer step over all ranks and
    microbatches.
    """

    data: str | None = option(
        None,
        "file, folder or URL to train on (default: the standard library's sources)",
        group=RUN,
        metavar="PATH",
        is_path=True,
    )
    model: str = option(
        "small", "size of the byte-level GPT", group=RUN, choices=tuple(MODEL_SIZES), defines=True
    )
    pack: bool = option(
        False,
        "batches of whole files and pieces of them, packed into rows of --seq-len bytes, in place "
        "of windows at random places",
        group=RUN,
        kind=bool,
        defines=True,
    )
    accumulate: int = count(
        1, "microbatches per step of --batch sequences", group=RUN, defines=True
    )
    clip: float = option(
        1.0,
        "largest gradient norm; 0 leaves gradients as they are",
        group=RUN,
        kind=float,
        metavar="MAX_NORM",
        least=0,
        defines=True,
    )
    nonfinite_grads: str = option(
        "raise",
        "what a step with a gradient that is NaN or infinite does: end the run, be left out, or "
        "count; the first two have the host wait for one number a step",
        group=RUN,
        choices=("raise", "skip", "keep"),
        defines=True,
    )
    dropout: float = option(
        0.0,
        "dropout probability",
        group=RUN,
        kind=float,
        metavar="P",
        least=0,
        below=1,
        defines=True,
    )
    seed: int = count(
        0, "seed of weights, batches and dropout", group=RUN, least=0, most=MAX_SEED, defines=True
    )
    nproc: int | None = count(
        None, "ranks to start on this machine (default: one a GPU, else 1)", group=RANKS
    )
    device: str = option("auto", "where to compute", group=RANKS, choices=("auto", "cpu", "cuda"))
    zero: int = option(3, "ZeRO level", group=RANKS, kind=int, choices=(0, 1, 2, 3))
    dp_outer: int = count(
        1,
        "replicas: so many groups of consecutive ranks, each of which shards the model",
        group=RANKS,
    )
    outer_strategy: str = option(
        "no_shard",
        "what replicas shard between them: nothing, or the optimizer's state",
        group=RANKS,
        choices=("no_shard", "optim"),
    )
    ranks_per_node: int | None = count(
        None,
        "sum gradients inside groups of so many ranks first, then between these "
        "(default: the ranks of a machine, where there are several)",
        group=RANKS,
    )
    compute: str = option(
        "fp32",
        "dtype of forward and backward",
        group=RANKS,
        choices=COMPUTE_DTYPES,
        defines=True,
    )
    grad_wire: str = option(
        "fp32",
        "format of gradients between ranks; sums are FP32",
        group=RANKS,
        choices=GRAD_WIRES,
        defines=True,
    )
    param_wire: str | None = option(
        None,
        "format of gathered weights (default: that of compute)",
        group=RANKS,
        choices=PARAM_WIRES,
        defines=True,
    )
    bucket_mib: float | None = option(
        None,
        "split a unit's buffer into pieces of this size (default: one bucket a unit)",
        group=RANKS,
        kind=float,
        metavar="X",
        above=0,
        below=math.inf,
    )
    graph: bool = option(
        False,
        "forward, backward and exchange of a step as one CUDA graph; on a CPU they run as they are",
        group=RANKS,
        kind=bool,
    )
    no_overlap: bool = option(
        False, "communicate in line with the computation", group=RANKS, kind=bool
    )
    heartbeat_limit_s: float = option(
        20.0,
        "end the run when a rank has not been heard of for this long; 0: never",
        group=RANKS,
        kind=float,
        metavar="SECONDS",
        least=0,
        most=MAX_COUNT,
    )
    use_torch_fsdp2: bool = option(
        False,
        "let PyTorch's own FSDP2 shard the model and sum its gradients",
        group=FSDP2,
        kind=bool,
    )
    gradient_accumulation_fusion: bool = option(
        False,
        "refused: kernels of layers add to gradients themselves",
        group=FSDP2,
        kind=bool,
        both_ways=True,
    )
    checkpoint: str | None = option(
        None, "folder or URL of the checkpoints", group=OUTPUT, metavar="DIR", is_path=True
    )
    ckpt_format: str = option(
        CKPT_FORMAT,
        "format of the checkpoints; this is the only one",
        group=OUTPUT,
        metavar="NAME",
    )
    checkpoint_every: int = count(
        0,
        "save after every N steps; 0: after the last one",
        group=OUTPUT,
        least=0,
        needs="checkpoint",
    )
    keep_checkpoints: int | None = count(
        None,
        "remove all but the last K complete checkpoints (default: keep all)",
        group=OUTPUT,
        metavar="K",
        needs="checkpoint",
    )
    resume: bool = option(
        False,
        "go on from the newest complete checkpoint in DIR",
        group=OUTPUT,
        kind=bool,
        needs="checkpoint",
    )
    json: str | None = option(
        None, "also write the result to this file", group=OUTPUT, metavar="FILE", is_path=True
    )
    metrics: str | None = option(
        None,
        "write the figures of each step to this file, a JSON object a line",
        group=MEASURES,
        metavar="FILE",
        is_path=True,
    )
    tensorboard: str | None = option(
        None,
        "write the figures of each step for TensorBoard",
        group=MEASURES,
        metavar="DIR",
        is_path=True,
    )
    timers: bool = option(
        False,
        "time the parts of a step on every rank, and tell which rank is late where",
        group=MEASURES,
        kind=bool,
    )
    energy: bool = option(
        False,
        "joules a step and a token, of GPUs by NVML and of CPUs by RAPL",
        group=MEASURES,
        kind=bool,
    )
    rerun: bool = option(
        False,
        "run a step again whose losses are rejected, and tell a fault of hardware that passes from "
        "one that stays and from one of the program; exit codes 16, resume on other hardware, and "
        "17",
        group=FAULTS,
        kind=bool,
        needs="checkpoint",
    )
    inject_fault: str | None = option(
        None,
        "for tests: --rerun with losses that are wrong once, on one piece of hardware, or "
        "everywhere; without --checkpoint, those of the run are removed with its end",
        group=FAULTS,
        choices=("transient", "persistent", "bug"),
    )
    inject_fault_at: int | None = count(
        None,
        "step of that fault (default: half of --steps)",
        group=FAULTS,
        metavar="K",
        needs="inject_fault",
    )
    inject_fault_rank: int = count(
        0, "rank of that fault", group=FAULTS, metavar="R", least=0, needs="inject_fault"
    )
    kill_at_step: int | None = count(
        None, "for tests: SIGKILL the rank itself right after step K", group=FAULTS, metavar="K"
    )
    kill_rank: int | None = count(
        None,
        "only this rank (default: every rank)",
        group=FAULTS,
        metavar="R",
        least=0,
        needs="kill_at_step",
    )

    def __post_init__(self) -> None:
        """Refuse what no run can use.

        Raises:
            OptionsError: a value outside its range, or options that exclude each other.
        """
        check_each(self)
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
        for name in ("kill_at_step", "inject_fault_at"):
            if (getattr(self, name) or 0) > self.steps:
                raise OptionsError(
                    f"expected {flag(name)} <= --steps {self.steps}, got {getattr(self, name)}; "
                    "name a step of the run"
                )
        if self.graph and self.pack:
            raise OptionsError(
                "expected no --pack beside --graph, got both: rows have other numbers of documents "
                "in each step, so that no graph would be replayed; leave one of them out"
            )
        self._check_as_megatron()

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
        if self.use_torch_fsdp2:
            self._check_as_torch_fsdp2()

    def _check_as_torch_fsdp2(self) -> None:
        defaults = {name: default for name, default, _ in options_of(TrainOptions)}
        refused = [name for name in NOT_OF_TORCH_FSDP2 if getattr(self, name) != defaults[name]]
        if self.nonfinite_grads == "skip":
            refused.append("nonfinite_grads")
        for name in refused:
            reason = NOT_OF_TORCH_FSDP2.get(name, "it looks at no gradient before it steps")
            raise OptionsError(
                f"expected no {flag(name)} beside --use-torch-fsdp2, got {getattr(self, name)}: "
                f"{reason}; leave one of them out"
            )

    @property
    def attributes_faults(self) -> bool:
        """Whether rejected results are looked into."""
        return self.rerun or self.inject_fault is not None

    def defining(self) -> dict[str, str | int | float]:
        """The options that decide the numbers of the run, by name, but for those left out."""
        return {
            name: int(value) if isinstance(value, bool) else value
            for name, value in asdict(self).items()
            if name in DEFINING_OPTIONS and value is not None and value is not False
        }


DEFINING_OPTIONS = frozenset(name for name, _, what in options_of(TrainOptions) if what.defines)
"""A checkpoint resumes only a run that agrees in these."""


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option of `TrainOptions` on the parser, with the same defaults."""
    add_arguments(parser, TrainOptions, (RUN, SCHEDULES))


def options_from(namespace: argparse.Namespace) -> TrainOptions:
    """Return the options that a parser with `add_train_arguments` read.

    Raises:
        OptionsError: as `TrainOptions`.
    """
    return TrainOptions(**values_from(namespace, TrainOptions))
