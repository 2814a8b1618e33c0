"""What a model-parallel trainer tells its parts, with Megatron-Core's names: sizes, dtypes, how a
pipeline runs, functions that it calls. All rules are checked when a config is made.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch

_logger = logging.getLogger("sidestream")

Count: TypeAlias = int
Limit: TypeAlias = int
Mebibytes: TypeAlias = float
Patterns: TypeAlias = tuple[str, ...]
Function = Callable[..., Any]
Functions = Function | Sequence[Function]


@dataclass(frozen=True, slots=True)
class Experimental:
    """Options of `ModelParallelConfig` that may still change or go, which a config takes only where
    they are allowed here, by their own names.

        ModelParallelConfig(..., overlap_p2p_comm_warmup_flush=True,
                            experimental=Experimental(overlap_p2p_comm_warmup_flush=True))
    """

    defer_embedding_wgrad_compute: bool = False
    overlap_p2p_comm_warmup_flush: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelConfig:
    """Sizes, dtypes and choices of model-parallel training. Never changed; `dataclasses.replace`
    makes another one. What is None follows the option that is named below.

    Sizes are those of `initialize_model_parallel`, which takes them as `**config.sizes()`.
    expert_tensor_parallel_size: None for tensor_model_parallel_size.
    sequence_parallel: activations between the parts of a layer are split over tp. pipeline_dtype:
    of what stages send; needed with a pipeline. autocast_dtype: None for params_dtype.
    microbatch_group_size_per_vp_stage: microbatches before a stage turns to its next part; None for
    the number of stages. wgrad_deferral_limit: microbatches whose embedding gradients wait with
    defer_embedding_wgrad_compute, 0 for all. grad_sync_func, param_sync_func: one, or one for each
    virtual stage. The other functions and flags are called and read by the trainer.

    Raises:
        ValueError: every rule that the values break, in one message.
    """

    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    virtual_pipeline_model_parallel_size: Count | None = None
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    expert_tensor_parallel_size: Count | None = None
    sequence_parallel: bool = False

    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False

    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    deallocate_pipeline_outputs: bool = False
    microbatch_group_size_per_vp_stage: Count | None = None
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: Limit = 0
    overlap_p2p_comm_warmup_flush: bool = False

    timers: Any = None
    barrier_with_L1_time: bool = True
    finalize_model_grads_func: Function | None = None
    grad_scale_func: Function | None = None
    no_sync_func: Functions | None = None
    grad_sync_func: Functions | None = None
    param_sync_func: Functions | None = None

    experimental: Experimental = Experimental()

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            texts = "".join(f"\n- {problem}" for problem in problems)
            raise ValueError(f"ModelParallelConfig: {len(problems)} to mend:{texts}")
        if self.expert_model_parallel_size > 1 < self.tensor_model_parallel_size and (
            not self.sequence_parallel
        ):
            _logger.warning(
                "ModelParallelConfig: expected sequence_parallel with experts over %d ranks and "
                "tensor parallelism over %d, got none: each rank of tp sends every token; pass "
                "sequence_parallel=True",
                self.expert_model_parallel_size,
                self.tensor_model_parallel_size,
            )

    def sizes(self) -> dict[str, Any]:
        """The arguments of `initialize_model_parallel` that are in a config."""
        names = [field.name for field in dataclasses.fields(ModelParallelConfig)]
        return {name: getattr(self, name) for name in names if name.endswith("_parallel_size")}


def _are_functions(value: Any) -> bool:
    several = isinstance(value, list | tuple) and len(value) > 0
    return all(map(callable, value)) if several else callable(value)


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "Count": (lambda value: type(value) is int and value >= 1, "a whole number of at least 1"),
    "Limit": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    "Mebibytes": (
        lambda value: isinstance(value, Real) and value is not True and 0 < float(value) < math.inf,
        "a positive number of MiB",
    ),
    "Patterns": (
        lambda value: isinstance(value, tuple) and all(isinstance(text, str) for text in value),
        "a tuple of texts",
    ),
    "torch.dtype": (lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
    "Function": (callable, "a function"),
    "Functions": (_are_functions, "a function, or a list with one for each virtual stage"),
    "Experimental": (lambda value: isinstance(value, Experimental), "Experimental(...)"),
}
"""What a field takes, by its annotation; with "| None" that too. Others are checked elsewhere."""

_NEEDS = (
    ("sequence_parallel", "tensor_model_parallel_size", ">=", 2),
    ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size", ">=", 2),
    ("bf16", "fp16", "=", False),
    ("defer_embedding_wgrad_compute", "pipeline_model_parallel_size", ">=", 2),
    ("defer_embedding_wgrad_compute", "gradient_accumulation_fusion", "=", True),
    ("overlap_p2p_comm_warmup_flush", "overlap_p2p_comm", "=", True),
    ("overlap_p2p_comm_warmup_flush", "batch_p2p_comm", "=", False),
)
"""What has to be true of another option where one is set."""
_HOLDS = {"=": operator.eq, ">=": operator.ge}


def checked_fields(config: Any, kind: type) -> tuple[Any, list[str]]:
    """What a configuration has in the fields of `kind`, the default where a value is of a wrong
    type, and what is wrong with those. What a class derived from `kind` adds is its own matter.
    """
    found, values = [], {}
    for field in dataclasses.fields(kind):
        annotation, _, none = str(field.type).partition(" | ")
        fits, expected = _TYPES.get(annotation, (lambda _: True, ""))
        value = values[field.name] = getattr(config, field.name)
        if not (fits(value) or (none and value is None)):
            values[field.name] = field.default
            expected = f"None or {expected}" if none else expected
            found.append(f"{field.name}: expected {expected}, got {value!r}; pass such a value")
    return types.SimpleNamespace(**values), found


def _problems(config: ModelParallelConfig) -> Iterator[str]:
    """Every rule that `config` breaks."""
    c, found = checked_fields(config, ModelParallelConfig)
    yield from found
    for name, other, sign, wanted in _NEEDS:
        got = getattr(c, other)
        if getattr(c, name) and not _HOLDS[sign](got, wanted):
            yield f"{name}: expected {other}{sign}{wanted}, got {got}; pass that, or leave it out"
    pipeline, parts = c.pipeline_model_parallel_size, c.virtual_pipeline_model_parallel_size
    if pipeline > 1 and c.pipeline_dtype is None:
        yield "pipeline_dtype: expected the dtype that stages send, got None; pass it"
    if parts and c.overlap_p2p_comm and c.batch_p2p_comm:
        yield (
            "overlap_p2p_comm: expected batch_p2p_comm=False with a virtual pipeline, got True; a "
            "batch does not overlap, choose one"
        )
    if (group := c.microbatch_group_size_per_vp_stage or pipeline) < pipeline:
        yield (
            f"microbatch_group_size_per_vp_stage: expected at least {pipeline}, a microbatch for "
            f"each stage, got {group}; pass more, or None"
        )
    for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        functions = getattr(c, name)
        if parts and isinstance(functions, list | tuple) and len(functions) != parts:
            yield (
                f"{name}: expected a function, or one for each of the {parts} parts of a stage, "
                f"got {len(functions)}; make them as many"
            )
    for name, allowed in dataclasses.asdict(c.experimental).items():
        if getattr(c, name) and not allowed:
            yield (
                f"{name}: expected experimental=Experimental({name}=True), since it may still "
                "change, got no such leave; pass it"
            )
