"""Every public function, argument by argument, with what it does not take: who is named, and kept.

The calls below are good. In each of them one argument at a time is replaced; the error says which,
what was expected and what came, and no tensor has changed by then.
"""

import re
from collections.abc import Iterator

import pytest
import torch

from sidestream import kernels as k

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors"
)

STOCHASTIC = {"rounding": "stochastic", "seed": 5, "first_index": 0}


def _ones(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype)


def _message(numels=(96, 5)):
    message = torch.zeros(k.message_layout("mxfp8", numels).num_bytes, dtype=torch.uint8)
    k.pack_message_(message, [_ones(numel) for numel in numels], "mxfp8")
    return message


def _shards(**more):
    scalars = ("lr", "step", "factor", "compute_scale", "amax")
    return {
        "param": _ones(32),
        "grad": _ones(32),
        **{name: _ones() for name in scalars},
        "found_inf": torch.tensor(False),
        "compute": _ones(32, dtype=torch.float8_e4m3fn),
        "weight_decay": 0.1,
        "maximize": False,
        "segments": k.Segments([0], _ones(1), _ones(1)),
        **more,
    }


def _of_parts_and_sides(x):
    """Casts of groups of rows, and of a matrix and its transpose."""
    ends = torch.tensor([1, 4])
    yield k.quantize_fp8_grouped, {"x": x, "ends": ends, "element": "e4m3", "power_of_2": False,
                                   "out": k.quantize_fp8_grouped(x, ends)}  # fmt: skip
    yield k.quantize_mx_grouped, {"x": x, "ends": ends, "element": "e4m3", "rule": "even",
                                  **STOCHASTIC, "out": k.quantize_mx_grouped(x, ends)}  # fmt: skip
    yield k.quantize_nvfp4_grouped, {"x": x, "ends": ends, "amaxes": _ones(2), **STOCHASTIC,
                                     "out": k.quantize_nvfp4_grouped(x, ends)[:2]}  # fmt: skip
    yield k.amax_nvfp4_grouped, {"x": x, "ends": ends, "out": _ones(2)}
    square = _ones(32, 32)
    of_mx, of_nvfp4 = k.quantize_mx_with_transpose(square), k.quantize_nvfp4_with_transpose(square)
    yield k.quantize_mx_with_transpose, {"x": square, "element": "e4m3", "rule": "even",
                                         **STOCHASTIC, "swizzled": False,
                                         "out": of_mx}  # fmt: skip
    yield k.quantize_nvfp4_with_transpose, {
        "x": square, "amaxes": (_ones(), _ones()), **STOCHASTIC, "hadamard": False, "square": False,
        "swizzled": False, "out": (of_nvfp4[0][:2], of_nvfp4[1][:2]),
    }  # fmt: skip
    yield k.amax_nvfp4_with_transpose, {"x": square, "out": (_ones(), _ones())}
    yield k.quantize_fp8_with_transpose, {
        "x": square, "element": "e4m3", "power_of_2": False, "scale": _ones(), "amax": _ones(),
        "out": k.quantize_fp8_with_transpose(square),
    }  # fmt: skip


def _calls():
    """(function, good arguments) by name."""
    x = _ones(4, 96)
    tensors = [_ones(96), _ones(5, dtype=torch.bfloat16)]
    fp8, mx, nvfp4 = k.quantize_fp8(x), k.quantize_mx(x), k.quantize_nvfp4(x)
    into = {"scale": 1.0, "accumulate": False}
    of_rows = {"format": "mxfp8", "row_numel": 1024}
    yield k.cast, {"x": x, "to": "bf16", **STOCHASTIC, "out": _ones(4, 96, dtype=torch.bfloat16)}
    yield k.cast_back, {"codes": fp8[0], "from_": "e4m3", "dtype": torch.float32, "out": x}
    yield k.quantize_fp8, {"x": x, "scaling": "tensor", "element": "e4m3", "power_of_2": False,
                           "scale": _ones(), "amax": _ones(), "out": fp8}  # fmt: skip
    yield k.dequantize_fp8, {"codes": fp8[0], "scale_inv": fp8[1], "scaling": "tensor",
                             "dtype": torch.float32, "out": x}  # fmt: skip
    yield k.update_fp8_scales_, {"amax_history": x, "scales": _ones(4), "element": "e4m3",
                                 "margin": 0, "algorithm": "max"}  # fmt: skip
    yield k.quantize_mx, {"x": x, "element": "e4m3", "rule": "even", **STOCHASTIC,
                          "swizzled": False, "out": mx}  # fmt: skip
    yield k.dequantize_mx, {"data": mx[0], "scales": mx[1], "element": "e4m3", "row_numel": 96,
                            "dtype": torch.float32, "swizzled": False, "out": x}  # fmt: skip
    yield k.quantize_nvfp4, {"x": x, "global_amax": _ones(), **STOCHASTIC, "variant": "te",
                             "hadamard": False, "swizzled": False, "nonfinite": "nan",
                             "out": nvfp4[:2]}  # fmt: skip
    yield k.dequantize_nvfp4, {"data": nvfp4[0], "scales": nvfp4[1], "global_amax": nvfp4[2],
                               "row_numel": 96, "dtype": torch.float32, "variant": "te",
                               "swizzled": False, "out": x}  # fmt: skip
    yield k.amax_nvfp4, {"x": x, "hadamard": False, "nonfinite": "nan", "out": _ones()}
    yield k.hadamard16, {"x": x, "inverse": False, "out": _ones(4, 96)}
    yield from _of_parts_and_sides(x)
    yield k.swizzle_scales, {"scales": mx[1]}
    yield k.unswizzle_scales, {"swizzled": k.swizzle_scales(mx[1]), "rows": 4, "columns": 3}
    yield k.pack_, {"flat": _ones(200), "tensors": tensors, "offsets": [0, 96], **into}
    yield k.unpack_, {"flat": _ones(200), "tensors": tensors, "offsets": [0, 96], **into}
    yield k.reduce_, {"out": _ones(96), "parts": x, **into}
    yield k.message_layout, {"numels": [96, 5], "parts": 2, **of_rows}
    yield k.read_header, {"message": _message(), "row_numel": 1024}
    yield k.pack_message_, {"message": _message(), "tensors": tensors, "offsets": [0, 128],
                            "scale": 1.0, "rule": "even", "power_of_2": False,
                            "rounding": "stochastic", "seed": 5, "first_indices": [0, 96],
                            **of_rows}  # fmt: skip
    yield k.unpack_message_, {"message": _message(), "tensors": tensors, "offsets": [0, 128],
                              **into, **of_rows}  # fmt: skip
    yield k.reduce_messages_, {"out": _ones(256), "messages": torch.stack([_message()] * 2),
                               **into, **of_rows}  # fmt: skip
    yield k.reduce_peer_messages_, {"out": _ones(256), "messages": [_message(), _message()],
                                    **into, **of_rows}  # fmt: skip
    yield k.flat_adamw_, _shards(exp_avg=_ones(32), exp_avg_sq=_ones(32), betas=(0.9, 0.99),
                                 eps=1e-8)  # fmt: skip
    yield k.flat_sgd_, _shards(momentum_buffer=_ones(32), momentum=0.9, dampening=0.0,
                               nesterov=False)  # fmt: skip
    yield k.l2_norm_, {"norm": _ones(), "tensors": tensors, "found_inf": torch.tensor(False),
                       "squared": False}  # fmt: skip
    yield k.wire_format_named, {"name": "bf16"}
    yield k.wire_format_of, {"dtype": torch.float32}


CALLS = {function.__name__: (function, arguments) for function, arguments in _calls()}
META = torch.ones((), device="meta")
NO_TENSORS = (1.5, [1.0], "x", object())


def _bad_tensors(good: torch.Tensor) -> Iterator[object]:
    yield good.to(torch.complex64)
    yield torch.quantize_per_tensor(good.float(), 1.0, 0, torch.qint8)
    if good.dim() and good.dtype in (torch.float32, torch.uint8):
        yield torch._neg_view(good)
        yield good.to_sparse()
        yield torch.nested.nested_tensor([good])


BY_TYPE = {
    bool: ("yes", 2, None, torch.tensor(True)),
    int: (1.5, "1", torch.tensor([1, 2]), torch.tensor(1).int(), META.long(), -(2**70)),
    float: ("a", None, [1.0], torch.ones(2), torch.tensor(1.0).double(), META, 10**400, 1j),
    str: ("foo", 1, None, []),
    torch.dtype: (torch.int8, "float32", None, []),
    k.Segments: (1, [0], (0, 1.0, 1.0)),
}


def _bad(good: object) -> Iterator[object]:
    """What cannot stand in the place of a good argument, whatever the function."""
    match good:
        case _ if type(good) in BY_TYPE:
            yield from BY_TYPE[type(good)]
        case torch.Tensor():
            yield from NO_TENSORS
            yield from _bad_tensors(good)
        case (torch.Tensor(), torch.Tensor()) if isinstance(good, list):
            yield from (1, None, good[0])
            yield from ([bad, good[1]] for bad in (*NO_TENSORS, None, *_bad_tensors(good[0])))
        case (torch.Tensor(), torch.Tensor()):
            yield from (1, good[0], good[:1], [*good, good[0]])
            yield from ((bad, good[1]) for bad in (*NO_TENSORS, None, *_bad_tensors(good[0])))
            yield from ((good[0], bad) for bad in (*NO_TENSORS, None, *_bad_tensors(good[1])))
        case list():
            yield from (1, torch.tensor(good), "01", [1.5, 2.5], [None, 0], [-1, -1], [0, "1"])
        case _:
            yield from (1, (0.9,), (0.9, 0.9, 0.9), (0.9, "a"), (None, 0.9), torch.ones(2))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _bytes(arguments: dict) -> list[list[int]]:
    found = _tensors(list(arguments.values()))
    return [tensor.reshape(-1).view(torch.uint8).tolist() for tensor in found]


def test_the_calls_are_good_and_are_all():
    functions = {name for name in k.__all__ if callable(getattr(k, name)) and name.islower()}
    assert CALLS.keys() == functions
    for function, arguments in CALLS.values():
        function(**arguments)


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_is_named(name):
    function, arguments = CALLS[name]
    before = _bytes(arguments)
    for argument, good in arguments.items():
        pattern = re.compile(rf"{argument}[\[\].\w]*: expected .*, got .+", re.DOTALL)
        for bad in _bad(good):
            try:
                function(**arguments | {argument: bad})
            except (TypeError, ValueError) as error:
                assert pattern.match(str(error)), (argument, bad, error)
            else:
                pytest.fail(f"{argument} was taken: {bad!r}")
    assert _bytes(arguments) == before


@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_two_devices_are_refused(name):
    function, arguments = CALLS[name]
    tensors = [key for key, good in arguments.items() if isinstance(good, torch.Tensor)]
    if sum(1 for _ in _tensors(list(arguments.values()))) < 2:
        pytest.skip("one tensor is on one device")
    before = _bytes(arguments)
    for argument in tensors:
        elsewhere = arguments[argument].to("meta")
        with pytest.raises(ValueError, match=r"^[\w.\[\]]+: expected device (cpu|meta), got"):
            function(**arguments | {argument: elsewhere})
    assert _bytes(arguments) == before


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_that_watches_operators_changes_no_refusal(name):
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    function, arguments = CALLS[name]
    flags = {key: good for key, good in arguments.items() if isinstance(good, bool)}
    for argument, good in flags.items():
        for bad in _bad(good):
            with (
                Watching(),
                pytest.raises((TypeError, ValueError), match=rf"^{argument}: exp.*got"),
            ):
                function(**arguments | {argument: bad})


FAR = 2**63 - 1
DRAWN = {
    "cast": lambda x, first, seed: k.cast(
        x, "e2m1", rounding="stochastic", seed=seed, first_index=first
    ),
    "mx": lambda x, first, seed: k.quantize_mx(
        x, element="e2m1", rounding="stochastic", seed=seed, first_index=first, swizzled=True
    ),
    "nvfp4": lambda x, first, seed: k.quantize_nvfp4(
        x, rounding="stochastic", seed=seed, first_index=first
    ),
    "message": lambda x, first, seed: k.pack_message_(
        _message([x.numel()]), [x], "mxfp8", rounding="stochastic", seed=seed, first_indices=[first]
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_indices_and_seeds_end_where_64_bits_do(name):
    x = torch.randn(256)
    for seed in (-(2**63), 2**64 - 1):
        DRAWN[name](x, FAR - 256, seed)
        DRAWN[name](torch.randn(1, 256), 0, seed)
    for first_index in (FAR - 255, FAR, 2**63, 2**70, -1):
        wanted = rf"^first_ind\w+(\[0\])?: expected 0 to {FAR - 256}, got {first_index};"
        with pytest.raises(ValueError, match=wanted):
            DRAWN[name](x, first_index, 0)
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(ValueError, match=rf"^seed: expected {-(2**63)} to .*, got {seed};"):
            DRAWN[name](x, 0, seed)


def test_an_index_out_of_range_is_refused_without_noise_too():
    with pytest.raises(ValueError, match=r"^first_index: expected 0 to"):
        k.cast(_ones(4), "bf16", first_index=-1)


@pytest.mark.parametrize("name", DRAWN)
def test_seeds_may_be_symbols(name):
    """One graph for all seeds, in a training that counts its steps."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def draw(x, first_index, seed):
        return DRAWN[name](x, first_index, seed)

    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True, backend=counted, dynamic=True)
    x = torch.randn(256)
    for seed, first_index in ((5, 32), (6, 64), (-7, 48), (2**62 + 1, 2**40)):
        found, expected = compiled(x, first_index, seed), draw(x, first_index, seed)
        for one, other in zip(_tensors(found), _tensors(expected), strict=True):
            assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
    assert len(graphs) == 1


@pytest.mark.parametrize("dynamic", [True, None])
def test_offsets_may_be_symbols(dynamic):
    def pack(x):
        numel = x.numel()
        flat = x.new_zeros(2 * numel)
        k.pack_(flat, [x, 2 * x], [numel, 0])
        message = torch.empty(16 + 4 * numel, dtype=torch.uint8)
        k.pack_message_(message, [2 * x, x], "bf16", offsets=[numel, 0])
        return flat, message

    torch._dynamo.reset()
    compiled = torch.compile(pack, fullgraph=True, backend="eager", dynamic=dynamic)
    for numel in (256, 1280):
        x = torch.randn(numel)
        assert all(map(torch.equal, compiled(x), pack(x)))


def test_offsets_that_are_symbols_are_checked():
    def pack(x):
        k.pack_(x.new_zeros(9), [x, x], [x.numel() - 1, 0])

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"offsets\[0\]: expected 4 or more"):
        torch.compile(pack, fullgraph=True, backend="eager", dynamic=True)(torch.ones(4))


def test_the_scale_of_nothing_records_nothing():
    scale = torch.full((1, 1), 4.0, requires_grad=True)
    memory = (torch.empty(0, 3, dtype=torch.float8_e4m3fn), torch.empty((), requires_grad=True))
    for out in (None, memory):
        _, scale_inv = k.quantize_fp8(torch.empty(0, 3), scale=scale, out=out)
        assert scale_inv == 0.25
        assert scale_inv.grad_fn is None
        assert scale_inv.requires_grad == (out is not None)


def test_a_row_that_has_not_these_bytes_is_named():
    data, scales = k.quantize_mx(_ones(4, 95), element="e2m1")
    assert k.dequantize_mx(data, scales, element="e2m1", row_numel=95).shape == (4, 95)
    for row_numel in (94, 97):
        with pytest.raises(ValueError, match=rf"^row_numel: expected 95 to 96, got {row_numel};"):
            k.dequantize_mx(data, scales, element="e2m1", row_numel=row_numel)


def test_a_header_without_bytes_is_refused():
    message = torch.empty(1040, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"^message: expected bytes to read, got a meta tensor"):
        k.read_header(message)
