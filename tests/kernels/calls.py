"""A good call of every public function, by its name: the function, and its arguments by theirs."""

import torch

from sidestream import kernels as k

STOCHASTIC = {"rounding": "stochastic", "seed": 5, "first_index": 0}


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype)


def message_of(numels=(96, 5)):
    message = torch.zeros(k.message_layout("mxfp8", numels).num_bytes, dtype=torch.uint8)
    k.pack_message_(message, [ones(numel) for numel in numels], "mxfp8")
    return message


def _shards(**more):
    scalars = ("lr", "step", "factor", "compute_scale", "amax")
    return {
        "param": ones(32),
        "grad": ones(32),
        **{name: ones() for name in scalars},
        "found_inf": torch.tensor(False),
        "compute": ones(32, dtype=torch.float8_e4m3fn),
        "weight_decay": 0.1,
        "maximize": False,
        "segments": k.Segments([0], ones(1), ones(1)),
        **more,
    }


def _calls():
    """(function, good arguments) by name."""
    x = ones(4, 96)
    tensors = [ones(96), ones(5, dtype=torch.bfloat16)]
    fp8, mx, nvfp4 = k.quantize_fp8(x), k.quantize_mx(x), k.quantize_nvfp4(x)
    into = {"scale": 1.0, "accumulate": False}
    of_rows = {"format": "mxfp8", "row_numel": 1024}
    yield k.cast, {"x": x, "to": "bf16", **STOCHASTIC, "out": ones(4, 96, dtype=torch.bfloat16)}
    yield k.cast_back, {"codes": fp8[0], "from_": "e4m3", "dtype": torch.float32, "out": x}
    yield k.quantize_fp8, {"x": x, "scaling": "tensor", "element": "e4m3", "power_of_2": False,
                           "scale": ones(), "amax": ones(), "out": fp8}  # fmt: skip
    yield k.dequantize_fp8, {"codes": fp8[0], "scale_inv": fp8[1], "scaling": "tensor",
                             "dtype": torch.float32, "out": x}  # fmt: skip
    yield k.update_fp8_scales_, {"amax_history": x, "scales": ones(4), "element": "e4m3",
                                 "margin": 0, "algorithm": "max"}  # fmt: skip
    yield k.quantize_mx, {"x": x, "element": "e4m3", "rule": "even", **STOCHASTIC,
                          "swizzled": False, "out": mx}  # fmt: skip
    yield k.dequantize_mx, {"data": mx[0], "scales": mx[1], "element": "e4m3", "row_numel": 96,
                            "dtype": torch.float32, "swizzled": False, "out": x}  # fmt: skip
    yield k.quantize_nvfp4, {"x": x, "global_amax": ones(), **STOCHASTIC, "variant": "te",
                             "hadamard": False, "swizzled": False, "nonfinite": "nan",
                             "out": nvfp4[:2]}  # fmt: skip
    yield k.dequantize_nvfp4, {"data": nvfp4[0], "scales": nvfp4[1], "global_amax": nvfp4[2],
                               "row_numel": 96, "dtype": torch.float32, "variant": "te",
                               "swizzled": False, "out": x}  # fmt: skip
    yield k.amax_nvfp4, {"x": x, "hadamard": False, "nonfinite": "nan", "out": ones()}
    yield k.hadamard16, {"x": x, "inverse": False, "out": ones(4, 96)}
    yield k.swizzle_scales, {"scales": mx[1]}
    yield k.unswizzle_scales, {"swizzled": k.swizzle_scales(mx[1]), "rows": 4, "columns": 3}
    yield k.pack_, {"flat": ones(200), "tensors": tensors, "offsets": [0, 96], **into}
    yield k.unpack_, {"flat": ones(200), "tensors": tensors, "offsets": [0, 96], **into}
    yield k.reduce_, {"out": ones(96), "parts": x, **into}
    yield k.message_layout, {"numels": [96, 5], "parts": 2, **of_rows}
    yield k.read_header, {"message": message_of(), "row_numel": 1024}
    yield k.pack_message_, {"message": message_of(), "tensors": tensors, "offsets": [0, 128],
                            "scale": 1.0, "rule": "even", "power_of_2": False,
                            "rounding": "stochastic", "seed": 5, "first_indices": [0, 96],
                            **of_rows}  # fmt: skip
    yield k.unpack_message_, {"message": message_of(), "tensors": tensors, "offsets": [0, 128],
                              **into, **of_rows}  # fmt: skip
    yield k.reduce_messages_, {"out": ones(256), "messages": torch.stack([message_of()] * 2),
                               **into, **of_rows}  # fmt: skip
    yield k.reduce_peer_messages_, {"out": ones(256), "messages": [message_of(), message_of()],
                                    **into, **of_rows}  # fmt: skip
    yield k.flat_adamw_, _shards(exp_avg=ones(32), exp_avg_sq=ones(32), betas=(0.9, 0.99),
                                 eps=1e-8)  # fmt: skip
    yield k.flat_sgd_, _shards(momentum_buffer=ones(32), momentum=0.9, dampening=0.0,
                               nesterov=False)  # fmt: skip
    yield k.l2_norm_, {"norm": ones(), "tensors": tensors, "found_inf": torch.tensor(False),
                       "squared": False}  # fmt: skip
    yield k.wire_format_named, {"name": "bf16"}
    yield k.wire_format_of, {"dtype": torch.float32}


CALLS = {function.__name__: (function, arguments) for function, arguments in _calls()}
