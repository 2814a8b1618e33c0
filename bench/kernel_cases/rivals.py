"""Owns the rivals that are packages of their own: torchao, and on a GPU TransformerEngine.

Each is a Bind that raises ImportError where its package is missing, and its package's own error
where that refuses the machine: the runner leaves it out and says so.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from .case import Bind, Operands, Run

TORCHAO = "torchao"
TRANSFORMER_ENGINE = "TransformerEngine"


@contextmanager
def quiet() -> Iterator[None]:
    """What a rival tells while it is loaded, compiled and tried is nobody's business here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def fp8(scaling: str) -> dict[str, Bind]:
    """Quantisers of torchao (tensor, row) and of TransformerEngine (all but row)."""

    def torchao(operands: Operands) -> Run:
        utils = import_module("torchao.float8.float8_utils")
        granularity = import_module("torchao.float8.config").ScalingGranularity
        (x,) = operands.read
        options = {"scaling_granularity": granularity.TENSORWISE}
        if scaling == "row":
            options = {"scaling_granularity": granularity.AXISWISE, "axiswise_dim": -1}

        def run() -> object:
            scale = utils.tensor_to_scale(x, torch.float8_e4m3fn, **options)
            return utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)

        return run

    def engine(operands: Operands) -> Run:
        (x,) = operands.read
        return _engine_run(x, _engine_fp8(scaling, x.device))

    found: dict[str, Bind] = {}
    if scaling in ("tensor", "row"):
        found[TORCHAO] = torchao
    if scaling != "row":
        found[TRANSFORMER_ENGINE] = engine
    return found


def mx(element: str) -> dict[str, Bind]:
    """torchao's cast, and for MXFP8 TransformerEngine's."""

    def torchao(operands: Operands) -> Run:
        to_mx = import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
        (x,) = operands.read
        dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float4_e2m1fn_x2
        return lambda: to_mx(x, dtype, 32)

    def engine(operands: Operands) -> Run:
        te, dtypes = _engine()
        (x,) = operands.read
        return _engine_run(x, te.MXFP8Quantizer(dtypes.kFloat8E4M3, rowwise=True, columnwise=False))

    found: dict[str, Bind] = {TORCHAO: torchao}
    if element == "e4m3":
        found[TRANSFORMER_ENGINE] = engine
    return found


def nvfp4() -> dict[str, Bind]:
    """torchao's cast with a known scale; TransformerEngine's, which looks for the amax as well."""

    def torchao(operands: Operands) -> Run:
        theirs = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        (x,), amax = operands.read, operands.scalars[0]
        scale = theirs.per_tensor_amax_to_scale(amax)
        return lambda: theirs.nvfp4_quantize(x, 16, scale)

    def engine(operands: Operands) -> Run:
        te, _ = _engine()
        (x,) = operands.read
        return _engine_run(x, te.NVFP4Quantizer(rowwise=True, columnwise=False))

    return {TORCHAO: torchao, f"{TRANSFORMER_ENGINE}, amax": engine}


def _engine() -> tuple[Any, Any]:
    if not torch.cuda.is_available():
        raise ImportError("it needs a GPU")
    return (
        import_module("transformer_engine.pytorch"),
        import_module("transformer_engine_torch").DType,
    )


def _engine_fp8(scaling: str, device: torch.device) -> Any:
    te, dtypes = _engine()
    element = dtypes.kFloat8E4M3
    if scaling == "tensor":
        quantizer = te.Float8CurrentScalingQuantizer(element, device=device)
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer
    return te.Float8BlockQuantizer(
        element,
        rowwise=True,
        columnwise=False,
        force_pow_2_scales=False,
        block_scaling_dim=1 if scaling == "1x128" else 2,
    )


def _engine_run(x: torch.Tensor, quantizer: Any) -> Run:
    """A call that quantises `x` into memory that is there."""
    out = quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device)
    return lambda: quantizer.update_quantized(x, out)
