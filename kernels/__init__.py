"""Tensors in, tensors out, on CPU and GPU: pack and sum, casts, wire messages, flat optimizers.

| group           | functions                                                                      |
|-----------------|--------------------------------------------------------------------------------|
| many tensors    | pack_, unpack_, reduce_                                                        |
| element formats | cast, cast_back                                                                |
| FP8 with scales | quantize_fp8, dequantize_fp8, update_fp8_scales_                               |
| MXFP8, MXFP4    | quantize_mx, dequantize_mx                                                     |
| NVFP4           | quantize_nvfp4, dequantize_nvfp4, amax_nvfp4, hadamard16                       |
| groups of rows  | quantize_fp8_grouped, quantize_mx_grouped, quantize_nvfp4_grouped,             |
|                 | amax_nvfp4_grouped                                                             |
| both ways       | quantize_mx_with_transpose, quantize_nvfp4_with_transpose,                     |
|                 | amax_nvfp4_with_transpose, quantize_fp8_with_transpose                         |
| scale layout    | swizzle_scales, unswizzle_scales                                               |
| wire messages   | message_layout, pack_message_, unpack_message_, read_header,                   |
|                 | reduce_messages_, reduce_peer_messages_                                        |
| optimizers      | flat_adamw_, flat_sgd_ (both with Segments), l2_norm_                          |

A name that ends in an underscore writes into its arguments; the others return new tensors, or fill
`out`. `docs/kernels.md`, made from `cases`, tells what each moves, how it rounds and what it is
held to. Importing this imports no Triton: that waits for the first call on a GPU.
"""

from .cast.op import cast, cast_back
from .formats.swizzle import swizzle_scales, unswizzle_scales
from .formats.table import (
    ALIGN_NUMEL,
    BF16,
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    ELEMENT_FORMATS,
    FP8_1X128,
    FP8_ROW,
    FP8_TENSOR,
    FP16,
    FP32,
    MXFP4,
    MXFP8,
    NVFP4,
    WIRE_FORMATS,
    BlockFormat,
    ElementFormat,
    WireFormat,
    wire_format_named,
    wire_format_of,
)
from .fp8.op import dequantize_fp8, quantize_fp8, update_fp8_scales_
from .grouped.op import (
    amax_nvfp4_grouped,
    quantize_fp8_grouped,
    quantize_mx_grouped,
    quantize_nvfp4_grouped,
)
from .launch import LaunchConfig
from .mx.op import dequantize_mx, quantize_mx
from .nvfp4.op import amax_nvfp4, dequantize_nvfp4, hadamard16, quantize_nvfp4
from .optim.norm_op import l2_norm_
from .optim.op import Segments, flat_adamw_, flat_sgd_
from .pack.op import pack_, reduce_, unpack_
from .transposed.op import (
    amax_nvfp4_with_transpose,
    quantize_fp8_with_transpose,
    quantize_mx_with_transpose,
    quantize_nvfp4_with_transpose,
)
from .wire.layout import MessageLayout, message_layout, read_header
from .wire.op import (
    pack_message_,
    reduce_messages_,
    reduce_peer_messages_,
    unpack_message_,
)

__all__ = [
    "ALIGN_NUMEL",
    "BF16",
    "BLOCK_FORMATS",
    "E2M1",
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E8M0",
    "ELEMENT_FORMATS",
    "FP8_1X128",
    "FP8_ROW",
    "FP8_TENSOR",
    "FP16",
    "FP32",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "WIRE_FORMATS",
    "BlockFormat",
    "ElementFormat",
    "LaunchConfig",
    "MessageLayout",
    "Segments",
    "WireFormat",
    "amax_nvfp4",
    "amax_nvfp4_grouped",
    "amax_nvfp4_with_transpose",
    "cast",
    "cast_back",
    "dequantize_fp8",
    "dequantize_mx",
    "dequantize_nvfp4",
    "flat_adamw_",
    "flat_sgd_",
    "hadamard16",
    "l2_norm_",
    "message_layout",
    "pack_",
    "pack_message_",
    "quantize_fp8",
    "quantize_fp8_grouped",
    "quantize_fp8_with_transpose",
    "quantize_mx",
    "quantize_mx_grouped",
    "quantize_mx_with_transpose",
    "quantize_nvfp4",
    "quantize_nvfp4_grouped",
    "quantize_nvfp4_with_transpose",
    "read_header",
    "reduce_",
    "reduce_messages_",
    "reduce_peer_messages_",
    "swizzle_scales",
    "unpack_",
    "unpack_message_",
    "unswizzle_scales",
    "update_fp8_scales_",
    "wire_format_named",
    "wire_format_of",
]
