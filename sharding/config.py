"""What a model-parallel trainer tells its parts, with Megatron-Core's names: sizes, dtypes, how a
pipeline runs, functions that it calls. All rules are checked when a config is made.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    makes another one. What is None follows another option, which `resolved` fills in.

    Sizes are those of `initialize_model_parallel`, which takes them as `**config.sizes()`.
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
        if problems := _problems(self):
            texts = "".join(f"\n- {problem}" for problem in problems)
            raise ValueError(f"ModelParallelConfig: {len(problems)} to mend:{texts}")
        tensor, experts = self.tensor_model_parallel_size, self.expert_model_parallel_size
        if min(tensor, experts) > 1 and not self.sequence_parallel:
            _logger.warning(
                "ModelParallelConfig: expected sequence_parallel with experts over %d ranks and "
                "tensor parallelism over %d, got none: each rank of tp sends every token; pass "
                "sequence_parallel=True",
                experts,
                tensor,
            )

    def sizes(self) -> dict[str, Any]:
        """The arguments of `initialize_model_parallel` that are in a config."""
        return {name: getattr(self, name) for name in _SIZES}

    def resolved(self) -> ModelParallelConfig:
        """This config without the None that stands for another option."""
        group = self.microbatch_group_size_per_vp_stage
        return dataclasses.replace(
            self,
            autocast_dtype=self.autocast_dtype or self.params_dtype,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size
            or self.tensor_model_parallel_size,
            microbatch_group_size_per_vp_stage=group or self.pipeline_model_parallel_size,
        )


_SIZES = tuple(
    field.name
    for field in dataclasses.fields(ModelParallelConfig)
    if field.name.endswith("_parallel_size")
)


def _is_positive(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and 0 < float(value) < math.inf


def _are_functions(value: Any) -> bool:
    several = isinstance(value, list | tuple) and len(value) > 0
    return all(map(callable, value)) if several else callable(value)


def _is_another_count(functions: Functions | None, count: int | None) -> bool:
    return isinstance(functions, list | tuple) and count not in (None, len(functions))


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "Count": (lambda value: type(value) is int and value >= 1, "a whole number of at least 1"),
    "Limit": (lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    "Mebibytes": (_is_positive, "a positive number of MiB"),
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

_RULES: tuple[tuple[Callable[[Any], object], str], ...] = (
    (
        lambda c: c.sequence_parallel and c.tensor_model_parallel_size == 1,
        "sequence_parallel: expected tensor_model_parallel_size above 1, got 1; leave it out",
    ),
    (
        lambda c: c.virtual_pipeline_model_parallel_size and c.pipeline_model_parallel_size == 1,
        "virtual_pipeline_model_parallel_size: expected pipeline_model_parallel_size above 1, got "
        "1; leave it out",
    ),
    (
        lambda c: c.pipeline_model_parallel_size > 1 and c.pipeline_dtype is None,
        "pipeline_dtype: expected the dtype that stages send, with pipeline_model_parallel_size "
        "above 1, got None; pass it",
    ),
    (
        lambda c: c.fp16 and c.bf16,
        "bf16: expected at most one of fp16 and bf16, got both; choose one",
    ),
    (
        lambda c: (
            c.virtual_pipeline_model_parallel_size and c.overlap_p2p_comm and c.batch_p2p_comm
        ),
        "overlap_p2p_comm: expected batch_p2p_comm=False with a virtual pipeline, got True; a "
        "batch does not overlap, choose one",
    ),
    (
        lambda c: (
            c.microbatch_group_size_per_vp_stage
            and c.microbatch_group_size_per_vp_stage < c.pipeline_model_parallel_size
        ),
        "microbatch_group_size_per_vp_stage: expected at least pipeline_model_parallel_size, got "
        "fewer, with which stages would wait; pass more, or None",
    ),
    *(
        (
            lambda c, name=name: _is_another_count(
                getattr(c, name), c.virtual_pipeline_model_parallel_size
            ),
            f"{name}: expected a function, or one for each of "
            "virtual_pipeline_model_parallel_size parts, got a list of another length; make them "
            "as many",
        )
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func")
    ),
    (
        lambda c: c.defer_embedding_wgrad_compute and c.pipeline_model_parallel_size == 1,
        "defer_embedding_wgrad_compute: expected pipeline_model_parallel_size above 1, got 1; "
        "leave it out, nothing waits there",
    ),
    (
        lambda c: c.defer_embedding_wgrad_compute and not c.gradient_accumulation_fusion,
        "defer_embedding_wgrad_compute: expected gradient_accumulation_fusion=True, which adds the "
        "deferred gradients, got False; pass it",
    ),
    (
        lambda c: c.overlap_p2p_comm_warmup_flush and not c.overlap_p2p_comm,
        "overlap_p2p_comm_warmup_flush: expected overlap_p2p_comm=True, got False; pass it",
    ),
    (
        lambda c: c.overlap_p2p_comm_warmup_flush and c.batch_p2p_comm,
        "overlap_p2p_comm_warmup_flush: expected batch_p2p_comm=False, got True; pass it",
    ),
)
"""What must not be, and what to say of it."""


def checked_fields(config: Any, kind: type) -> tuple[Any, list[str]]:
    """What a configuration has in the fields of `kind`, the default where a value is of a wrong
    type, and what is wrong with those. What a class derived from `kind` adds is its own matter.
    """
    found, values = [], {}
    for field in dataclasses.fields(kind):
        annotation, _, optional = str(field.type).partition(" | ")
        fits, expected = _TYPES.get(annotation, (lambda _: True, ""))
        value = getattr(config, field.name)
        right = fits(value) or (value is None and bool(optional))
        values[field.name] = value if right else field.default
        if not right:
            none = "None or " if optional else ""
            found.append(
                f"{field.name}: expected {none}{expected}, got {value!r}; pass such a value"
            )
    return types.SimpleNamespace(**values), found


def _problems(config: ModelParallelConfig) -> list[str]:
    """Every rule that `config` breaks."""
    checked, found = checked_fields(config, ModelParallelConfig)
    found += [text for is_broken, text in _RULES if is_broken(checked)]
    for name, allowed in dataclasses.asdict(checked.experimental).items():
        if getattr(checked, name) and not allowed:
            found.append(
                f"{name}: expected experimental=Experimental({name}=True), since it may still "
                "change, got no such leave; pass it"
            )
    return found
