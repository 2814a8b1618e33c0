"""Which dtype each copy has, option by option."""

from typing import Any

import pytest
import torch

from sidestream.sharding.precision import (
    MixedPrecisionPolicy,
    UnitDtypes,
    resolve_dtypes,
    resolve_wires,
)
from sidestream.sharding.wire_choice import ParamWires

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _trained(compute: Any, main: Any, grad: Any, wire: Any) -> tuple[UnitDtypes, Any]:
    return UnitDtypes(compute, main, main, grad), wire


# Options, dtype of the model -> compute, main, grad, wire.
CASES: dict[str, tuple[dict[str, Any], torch.dtype, tuple[UnitDtypes, Any]]] = {
    "fp32": ({}, FP32, _trained(FP32, FP32, FP32, FP32)),
    "bf16 model": ({}, BF16, _trained(BF16, FP32, FP32, BF16)),
    "bf16 compute": ({"param_dtype": BF16}, FP32, _trained(BF16, FP32, FP32, BF16)),
    "bf16 compute, fp32 wire": (
        {"param_dtype": BF16, "grad_comm_dtype": FP32},
        FP32,
        _trained(BF16, FP32, FP32, FP32),
    ),
    "bf16 wire": ({"grad_comm_dtype": BF16}, FP32, _trained(FP32, FP32, FP32, BF16)),
    "main as the model": (
        {"main_params_dtype": None, "main_grads_dtype": None},
        BF16,
        _trained(BF16, BF16, BF16, BF16),
    ),
    "gradients as main": (
        {"param_dtype": FP16, "main_params_dtype": BF16, "main_grads_dtype": None},
        FP32,
        _trained(FP16, BF16, BF16, FP16),
    ),
    "all apart": (
        {"param_dtype": FP16, "main_grads_dtype": BF16, "grad_comm_dtype": FP32},
        BF16,
        _trained(FP16, FP32, BF16, FP32),
    ),
}


@pytest.mark.parametrize(("options", "dtype", "expected"), CASES.values(), ids=CASES)
def test_what_each_option_decides(
    options: dict[str, Any], dtype: torch.dtype, expected: tuple[UnitDtypes, Any]
) -> None:
    policy = MixedPrecisionPolicy(**options)
    dtypes = resolve_dtypes(policy, dtype, trainable=True)
    wire, partial = resolve_wires(policy, ParamWires(policy.grad_wire), dtypes.compute)
    assert (dtypes, wire.dtype) == expected
    assert partial.dtype == FP32, "sums of several ranks keep their precision"


@pytest.mark.parametrize(
    ("dtype", "main"), [(BF16, BF16), (FP32, FP32)], ids=["bf16 model", "fp32 model"]
)
def test_frozen_units_have_no_wider_main_copy(dtype: torch.dtype, main: torch.dtype) -> None:
    dtypes = resolve_dtypes(MixedPrecisionPolicy(param_dtype=BF16), dtype, trainable=False)
    assert (dtypes.compute, dtypes.main, dtypes.master) == (BF16, main, FP32)
