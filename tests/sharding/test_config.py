"""Every rule of ModelParallelConfig, alone and all at once."""

import dataclasses
import logging
from typing import Any

import pytest
import torch

from sidestream.sharding.config import Experimental, ModelParallelConfig
from sidestream.sharding.model_parallel_layout import ModelParallelLayout

PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}
DEFERRED = {
    "defer_embedding_wgrad_compute": True,
    "experimental": Experimental(defer_embedding_wgrad_compute=True),
}
FLUSHED = {
    "overlap_p2p_comm_warmup_flush": True,
    "experimental": Experimental(overlap_p2p_comm_warmup_flush=True),
}
OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}

LEGAL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": PIPELINE,
    "virtual pipeline": {**PIPELINE, "virtual_pipeline_model_parallel_size": 2, **OVERLAPPED},
    "overlap or a batch without virtual stages": {**PIPELINE, "overlap_p2p_comm": True},
    "groups of microbatches": {**PIPELINE, "microbatch_group_size_per_vp_stage": 2},
    "deferred": {**PIPELINE, **DEFERRED, "gradient_accumulation_fusion": True},
    "flushed": {**PIPELINE, **FLUSHED, **OVERLAPPED},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16},
    "functions": {"grad_scale_func": float, "grad_sync_func": [print, print], "timers": object()},
}

# What is wrong, and what each of its problems begins with.
ILLEGAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sequence parallel alone": (
        {"sequence_parallel": True},
        ["sequence_parallel: expected tensor_model_parallel_size>=2, got 1; pass that, or"],
    ),
    "pipeline without dtype": ({"pipeline_model_parallel_size": 2}, ["pipeline_dtype: expected"]),
    "virtual pipeline alone": (
        {"virtual_pipeline_model_parallel_size": 2},
        ["virtual_pipeline_model_parallel_size: expected pipeline_model_parallel_size>=2, got 1"],
    ),
    "two low precisions": ({"bf16": True, "fp16": True}, ["bf16: expected fp16=False, got True"]),
    "overlap and a batch": (
        {**PIPELINE, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True},
        ["overlap_p2p_comm: expected batch_p2p_comm=False with a virtual pipeline"],
    ),
    "few microbatches": (
        {**PIPELINE, "microbatch_group_size_per_vp_stage": 1},
        ["microbatch_group_size_per_vp_stage: expected at least 2, a microbatch for each stage"],
    ),
    "deferred without a pipeline": (
        {**DEFERRED, "gradient_accumulation_fusion": True},
        ["defer_embedding_wgrad_compute: expected pipeline_model_parallel_size>=2, got 1"],
    ),
    "deferred without fusion": (
        {**PIPELINE, **DEFERRED},
        ["defer_embedding_wgrad_compute: expected gradient_accumulation_fusion=True"],
    ),
    "limit": (
        {"wgrad_deferral_limit": -1},
        ["wgrad_deferral_limit: expected a whole number of at least 0, got -1"],
    ),
    "flushed without overlap": (
        {**PIPELINE, **FLUSHED, "batch_p2p_comm": False},
        ["overlap_p2p_comm_warmup_flush: expected overlap_p2p_comm=True"],
    ),
    "flushed and a batch": (
        {**PIPELINE, **FLUSHED, "overlap_p2p_comm": True},
        ["overlap_p2p_comm_warmup_flush: expected batch_p2p_comm=False"],
    ),
    "experimental deferral": (
        {**PIPELINE, **DEFERRED, "gradient_accumulation_fusion": True, "experimental": None},
        [
            "experimental: expected Experimental(...), got None",
            "defer_embedding_wgrad_compute: expected experimental=Experimental("
            "defer_embedding_wgrad_compute=True)",
        ],
    ),
    "experimental flush": (
        {**PIPELINE, **FLUSHED, **OVERLAPPED, "experimental": Experimental()},
        [
            "overlap_p2p_comm_warmup_flush: expected experimental=Experimental("
            "overlap_p2p_comm_warmup_flush=True)"
        ],
    ),
    "types": (
        {
            "tensor_model_parallel_size": 0,
            "context_parallel_size": True,
            "expert_tensor_parallel_size": 1.0,
            "expert_model_parallel_size": None,
            "bf16": 1,
            "params_dtype": "bf16",
            "autocast_dtype": "bf16",
            "grad_scale_func": 2.0,
            "no_sync_func": [],
            "param_sync_func": [print, None],
        },
        [
            "tensor_model_parallel_size: expected a whole number of at least 1, got 0",
            "context_parallel_size: expected a whole number of at least 1, got True",
            "expert_model_parallel_size: expected a whole number of at least 1, got None",
            "expert_tensor_parallel_size: expected None or a whole number of at least 1, got 1.0",
            "bf16: expected True or False, got 1",
            "params_dtype: expected a torch.dtype, got 'bf16'",
            "autocast_dtype: expected None or a torch.dtype, got 'bf16'",
            "grad_scale_func: expected None or a function, got 2.0",
            "no_sync_func: expected None or a function, or a list",
            "param_sync_func: expected None or a function, or a list",
        ],
    ),
    "functions of parts": (
        {
            **PIPELINE,
            "virtual_pipeline_model_parallel_size": 2,
            "no_sync_func": print,
            "grad_sync_func": [print],
            "param_sync_func": [print, print],
        },
        ["grad_sync_func: expected a function, or one for each of the 2 parts of a stage, got 1"],
    ),
    "all at once": (
        {
            "tensor_model_parallel_size": "1",
            "sequence_parallel": True,
            "virtual_pipeline_model_parallel_size": 2,
            "bf16": True,
            "fp16": True,
            "defer_embedding_wgrad_compute": True,
            "wgrad_deferral_limit": -2,
            "overlap_p2p_comm_warmup_flush": True,
        },
        [
            "tensor_model_parallel_size",
            "wgrad_deferral_limit",
            "sequence_parallel",
            "virtual_pipeline_model_parallel_size",
            "bf16",
            "defer_embedding_wgrad_compute: expected pipeline",
            "defer_embedding_wgrad_compute: expected gradient",
            "overlap_p2p_comm_warmup_flush: expected overlap",
            "overlap_p2p_comm_warmup_flush: expected batch",
            "defer_embedding_wgrad_compute: expected experimental",
            "overlap_p2p_comm_warmup_flush: expected experimental",
        ],
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    config = ModelParallelConfig(**LEGAL[name])
    assert {key: getattr(config, key) for key in LEGAL[name]} == LEGAL[name]


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal(name: str) -> None:
    options, expected = ILLEGAL[name]
    with pytest.raises(
        ValueError, match=f"ModelParallelConfig: {len(expected)} to mend:"
    ) as caught:
        ModelParallelConfig(**options)
    _, *lines = str(caught.value).split("\n- ")
    assert [line.startswith(start) for line, start in zip(lines, expected, strict=True)] == [
        True
    ] * len(expected), lines
    assert all(", got " in line and "; " in line for line in lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derived(ModelParallelConfig):
    hidden_size: int = 3
    layers: list[str] = dataclasses.field(default_factory=list)


def test_a_class_derived_from_it_has_fields_of_its_own() -> None:
    config = Derived(tensor_model_parallel_size=2, layers=["a"])
    assert (config.layers, config.hidden_size) == (["a"], 3)
    assert "hidden_size" not in config.sizes()
    with pytest.raises(ValueError, match="1 to mend:\n- sequence_parallel: expected"):
        Derived(sequence_parallel=True)


def test_never_changes() -> None:
    config = ModelParallelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bf16 = True  # type: ignore[misc]
    assert dataclasses.replace(config, bf16=True).bf16 and not config.bf16


def test_sizes_are_those_of_a_layout() -> None:
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, expert_model_parallel_size=4, sequence_parallel=True
    )
    layout = ModelParallelLayout(world_size=8, **config.sizes())
    assert layout.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_experts_that_get_every_token_twice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sidestream"):
        ModelParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=4)
        ModelParallelConfig(
            tensor_model_parallel_size=2, expert_model_parallel_size=4, sequence_parallel=True
        )
    (text,) = [record.getMessage() for record in caplog.records]
    assert "experts over 4 ranks and tensor parallelism over 2" in text
    assert "pass sequence_parallel=True" in text
