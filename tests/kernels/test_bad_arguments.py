"""Every public function, argument by argument, with what it does not take: who is named, and kept.

The calls of `calls` are good. In each of them one argument at a time is replaced; the error says
which, what was expected and what came, and no tensor has changed by then.
"""

import re
from collections.abc import Iterator

import pytest
import torch

from sidestream import kernels as k
from sidestream.tests.kernels.calls import CALLS, message_of, ones

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors"
)

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
        message_of([x.numel()]),
        [x],
        "mxfp8",
        rounding="stochastic",
        seed=seed,
        first_indices=[first],
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
        k.cast(ones(4), "bf16", first_index=-1)


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
    data, scales = k.quantize_mx(ones(4, 95), element="e2m1")
    assert k.dequantize_mx(data, scales, element="e2m1", row_numel=95).shape == (4, 95)
    for row_numel in (94, 97):
        with pytest.raises(ValueError, match=rf"^row_numel: expected 95 to 96, got {row_numel};"):
            k.dequantize_mx(data, scales, element="e2m1", row_numel=row_numel)


def test_a_header_without_bytes_is_refused():
    message = torch.empty(1040, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"^message: expected bytes to read, got a meta tensor"):
        k.read_header(message)
