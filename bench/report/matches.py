"""Owns which case that is compiled ahead of time has the code that a measured case runs.

A case of the benchmark is what a user calls, a case of `kernels.ahead` one kernel with its options.
They match where one call is one launch of that kernel on the path of full tiles, on the same
dtypes, so that both move the same bytes; the rest have no match, such as a scale for a whole
tensor, which takes two kernels. A match may compile options that the call leaves out (the scale of
a sum, Nesterov's momentum), which add an instruction or two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..kernel_cases.matrix import STOCHASTIC
from ..reports import Row

_OTHER = "bf16"
"""What is on the other side of the codes, or of the flat buffer, in `kernels.ahead`."""
_ELEMENTS = {"mxfp8": "e4m3", "mxfp4": "e2m1"}
_QUANTIZED = {
    "fp8_row": "rows",
    "fp8_1x128": "1x128",
    "fp8_128x128": "128x128",
    "fp8_delayed": "delayed",
}
_SCALINGS = {"fp8_tensor": "tensor", "fp8_1x128": "1x128", "fp8_128x128": "128x128"}


def _accumulating(row: Row) -> str:
    return " accumulate" if row.case.endswith(" accumulate") else ""


def _stochastic(row: Row) -> str:
    return " stochastic" if row.case.endswith(STOCHASTIC) else ""


def _reduced(row: Row) -> str | None:
    # Only sums that are added to the result are compiled.
    return f"{row.format} -> {row.dtype} world {row.world}" if _accumulating(row) else None


def _nvfp4(row: Row) -> str:
    hadamard = "hadamard" if row.case.endswith(" hadamard") else ""
    name = hadamard or _stochastic(row).strip() or "nearest"
    return name if row.dtype == _OTHER else f"{name} {row.dtype}"


def _summed(row: Row) -> str:
    return f"{row.format} -> {row.dtype} world {row.world}"


def _stepped(row: Row) -> str:
    return f"{row.dtype} -> {row.format} one segment"


_ONLY_OTHER = (
    "pack_", "unpack_", "cast_", "cast_back_", "quantize_fp8_", "dequantize_fp8_", "quantize_mx_",
    "dequantize_mx_",
)  # fmt: skip
_NAMES: Mapping[str, Callable[[Row], str | None]] = {
    "pack_": lambda row: row.format + _accumulating(row),
    "unpack_": lambda row: row.format,
    "reduce_": _reduced,
    "cast_": lambda row: row.format + _stochastic(row),
    "cast_back_": lambda row: row.format,
    "quantize_fp8_": lambda row: _QUANTIZED.get(row.format),
    "dequantize_fp8_": lambda row: _SCALINGS.get(row.format),
    "quantize_mx_": lambda row: _ELEMENTS[row.format] + _stochastic(row),
    "dequantize_mx_": lambda row: _ELEMENTS[row.format],
    "amax_nvfp4_": lambda row: row.dtype,
    "quantize_nvfp4_": _nvfp4,
    "dequantize_nvfp4_": lambda row: f"te {row.dtype}",
    "hadamard16_": lambda row: f"forward {row.dtype}",
    "pack_message_": lambda row: f"{row.format} from {row.dtype}",
    "unpack_message_": lambda row: f"{row.format} to {row.dtype}",
    "reduce_messages_": _summed,
    "reduce_peer_messages_": _summed,
    "flat_adamw_": _stepped,
    "flat_sgd_": _stepped,
    "l2_norm_": lambda row: "fp32" if row.dtype == "fp32" else "half",
}


def name_ahead(row: Row) -> str | None:
    """What the case with the code of `row` would be called among those of its op; `None` where no
    single kernel is all of it. There need not be such a case.
    """
    if row.op not in _NAMES or (row.op in _ONLY_OTHER and row.dtype != _OTHER):
        return None
    return _NAMES[row.op](row)
