"""The registered ops: results, every refusal, fake tensors, torch.compile, autograd."""

import contextlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sidestream.kernels import pack_, reduce_, unpack_
from sidestream.kernels.pack import reference
from sidestream.tests.kernels import oracle

SHAPES = [(3, 5), (), (0,), (128,), (7, 1, 3)]


def _case(flat_dtype=torch.bfloat16):
    return oracle.make_case(SHAPES, oracle.DTYPES, flat_dtype)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the ops that pass."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watched", [False, True], ids=["direct", "dispatched"])
def test_public_functions_and_ops_agree_with_the_definition(watched):
    seen = Seen()

    def run(function):
        def call(*arguments):
            scale, accumulate = arguments[-2:]
            if not watched:
                return function(*arguments[:-2], scale=scale, accumulate=accumulate)
            with seen:
                return function(*arguments[:-2], scale=scale, accumulate=accumulate)

        return call

    oracle.check_pack(run(pack_), _case(), 0.3, True)
    oracle.check_unpack(run(unpack_), _case(), 0.3, True)
    oracle.check_reduce(run(reduce_), 3, 131, (torch.bfloat16, torch.float32), 0.3, True)
    ours = [name for name in seen.names if name.startswith("sidestream::")]
    wanted = ["sidestream::pack_", "sidestream::unpack_", "sidestream::reduce_"]
    assert ours == (wanted if watched else [])


def test_defaults_are_a_plain_copy():
    flat, tensors = torch.zeros(256), [torch.ones(2, 3), torch.full((4,), 2.0)]
    pack_(flat, tensors, [0, 128])
    assert flat.nonzero().view(-1).tolist() == [*range(6), *range(128, 132)]
    copies = [torch.empty(2, 3), torch.empty(4)]
    unpack_(copies, flat, [0, 128])
    assert all(map(torch.equal, copies, tensors))


def test_nothing_is_recorded_for_autograd():
    parameter = torch.nn.Parameter(torch.ones(4))
    flat = torch.zeros(4)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            pack_(flat, [parameter], [0], scale=2.0)
            unpack_([parameter], flat, [0], scale=2.0)
            torch.ops.sidestream.pack_(flat, [parameter], [0])
            reduce_(flat, parameter.view(1, 4).detach())
    assert flat.grad_fn is None
    assert parameter.is_leaf
    assert parameter.tolist() == [16.0] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"flat": torch.zeros(2, 8)},
            r"flat: expected a contiguous 1-D tensor, got shape \(2, 8\)",
        ),
        ({"flat": torch.zeros(32)[::2]}, r"flat: expected a contiguous 1-D .* strides \(2,\)"),
        ({"flat": torch.zeros(16, dtype=torch.int32)}, r"flat: expected torch\.float32"),
        ({"offsets": [0]}, r"offsets: expected one per tensor, 2, got 1"),
        ({"offsets": [0, 13]}, r"offsets\[1\]: expected 0 to 12 for 4 elements .* got 13"),
        ({"offsets": [-1, 8]}, r"offsets\[0\]: expected 0 to 12 .* got -1"),
        ({"offsets": [0, 3]}, r"offsets\[1\]: expected 4 or more, where tensors\[0\] ends, got 3"),
        ({"offsets": [3, 0]}, r"offsets\[0\]: expected 4 or more, where tensors\[1\] ends, got 3"),
        (
            {"tensors": [torch.zeros(4), torch.zeros(4, dtype=torch.int64)]},
            r"tensors\[1\]: expected .* got torch\.int64; cast",
        ),
        (
            {"tensors": [torch.zeros(4), torch.zeros(4, device="meta")]},
            r"tensors\[1\]: expected device cpu, got meta; move",
        ),
    ],
)
def test_pack_refuses_before_it_writes(change, message):
    arguments = {
        "flat": torch.zeros(16),
        "tensors": [torch.ones(4), torch.ones(4)],
        "offsets": [0, 8],
    } | change
    with pytest.raises(ValueError, match=message):
        pack_(**arguments)
    assert not arguments["flat"].any()


def test_unpack_may_read_an_interval_twice_but_not_outside():
    flat, tensors = torch.arange(8.0), [torch.empty(4), torch.empty(4)]
    unpack_(tensors, flat, [2, 2])
    assert tensors[0].equal(tensors[1])
    with pytest.raises(ValueError, match=r"offsets\[1\]: expected 0 to 4"):
        unpack_(tensors, flat, [0, 5])


@pytest.mark.parametrize(
    ("out", "parts", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(2, 4), r"out: expected a contiguous 1-D tensor"),
        (torch.zeros(8)[::2], torch.zeros(2, 4), r"out: expected a contiguous 1-D tensor"),
        (torch.zeros(4), torch.zeros(8), r"parts: expected shape \(world, 4\).*got \(8,\)"),
        (torch.zeros(4), torch.zeros(2, 3), r"parts: expected shape \(world, 4\).*got \(2, 3\)"),
        (torch.zeros(4), torch.zeros(0, 4), r"parts: expected .* world >= 1, got \(0, 4\)"),
        (torch.zeros(4), torch.zeros(4, 2).t(), r"parts: expected a contiguous tensor"),
        (torch.zeros(4), torch.zeros(2, 4).double(), r"parts: expected torch.*got torch.float64"),
        (torch.zeros(4), torch.zeros(2, 4, device="meta"), r"parts: expected device cpu"),
    ],
)
def test_reduce_refuses(out, parts, message):
    with pytest.raises(ValueError, match=message):
        reduce_(out, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_op_itself_resizes_nothing(dtype):
    for numel in (2, 8):
        out = torch.zeros(numel, dtype=dtype)
        with pytest.raises(ValueError, match=rf"out: expected 4 elements, .*got {numel}; pass"):
            torch.ops.sidestream.reduce_(out, torch.ones(2, 4))
        assert torch.equal(out, torch.zeros(numel, dtype=dtype))


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_run_and_write_nothing(device):
    with FakeTensorMode():
        flat = torch.empty(256, device=device, dtype=torch.bfloat16)
        tensors = [torch.empty(3, 5, device=device), torch.empty(4, device=device)]
        pack_(flat, tensors, [0, 128], scale=0.5)
        unpack_(tensors, flat, [0, 128], accumulate=True)
        reduce_(flat, torch.empty(2, 256, device=device))
    assert flat.shape == (256,)


def test_trusted_views_do_not_hide_the_ops_from_a_mode():
    flat, parts = torch.zeros(256), torch.ones(2, 256)
    with Seen() as seen:
        pack_(flat, [torch.ones(4)], [0], scale=0.25, slots=[flat[:4]])
        reduce_(flat, parts, scale=0.25, rows=list(parts))
    assert {"sidestream::pack_", "sidestream::reduce_"} <= set(seen.names)
    assert torch.equal(flat, torch.full((256,), 0.5))


@pytest.mark.parametrize("world", [1, 3, 40])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, Seen], ids=["directly", "in a mode"])
def test_rows_that_lie_apart_are_summed_like_a_table(world, mode):
    parts = torch.randn(world, 7).bfloat16()
    expected, out = torch.ones(7), torch.ones(7)
    reduce_(expected, parts, scale=0.3, accumulate=True)
    with mode():
        rows = [part.clone() for part in parts]
        reduce_(out, None, scale=0.3, accumulate=True, rows=rows)
    assert torch.equal(out, expected)


def test_a_sum_of_neither_table_nor_rows_is_refused():
    with pytest.raises(TypeError, match=r"parts: expected a torch\.Tensor, got None without rows"):
        reduce_(torch.zeros(4), None)


def test_what_a_fake_mode_saw_is_not_kept():
    with FakeTensorMode():
        reference.reduce_(torch.empty(8), torch.empty(2, 8), scale=0.4375)
    out = torch.empty(8)
    reference.reduce_(out, torch.ones(2, 8), scale=0.4375)
    assert torch.equal(out, torch.full((8,), 0.875))


def test_meta_tensors_without_a_mode_are_checked_and_stay_as_they_are():
    flat = torch.empty(256, device="meta")
    tensor = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    parts = torch.empty(2, 256, device="meta")
    assert pack_(flat, [tensor], [0], scale=0.5) is None
    assert unpack_([tensor], flat, [241], accumulate=True) is None
    assert reduce_(flat, parts) is None
    for found, shape, dtype in [
        (flat, (256,), torch.float32),
        (tensor, (3, 5), torch.bfloat16),
        (parts, (2, 256), torch.float32),
    ]:
        assert (found.shape, found.dtype, found.device.type) == (shape, dtype, "meta")
    with pytest.raises(ValueError, match=r"offsets\[0\]: expected 0 to 241"):
        pack_(flat, [tensor], [242])
    with pytest.raises(ValueError, match=r"parts: expected shape \(world, 256\)"):
        reduce_(flat, parts[:, :-1])


def test_torch_compile_keeps_the_ops_whole():
    case = _case(torch.float32)
    parts = oracle.values(3 * 131, torch.bfloat16, seed=1).view(3, 131)
    tensors = [tensor.clone() for tensor in case.tensors]
    out = torch.zeros(131)
    graphs = []

    def step(flat, tensors, out, parts):
        pack_(flat, tensors, case.offsets, scale=0.5, accumulate=True)
        unpack_(tensors, flat, case.offsets, accumulate=True)
        reduce_(out, parts, scale=0.3)
        return flat + 1.0

    expected_flat = case.flat.clone()
    expected = [tensor.clone() for tensor in tensors]
    expected_out = out.clone()
    expected_sum = step(expected_flat, expected, expected_out, parts)

    def backend(graph, inputs):
        graphs.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    flat = case.flat.clone()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    oracle.assert_same_bits(compiled(flat, tensors, out, parts), expected_sum)
    oracle.assert_same_bits(flat, expected_flat)
    oracle.assert_same_bits(out, expected_out)
    for tensor, wanted in zip(tensors, expected, strict=True):
        oracle.assert_same_bits(tensor, wanted)
    assert len(graphs) == 1
    assert str(graphs[0].graph).count("sidestream.") == 3


def test_importing_and_using_the_cpu_path_needs_no_triton():
    code = (
        "import sys, torch; sys.modules['triton'] = None\n"
        "from sidestream.kernels import pack_\n"
        "flat = torch.zeros(4); pack_(flat, [torch.ones(4)], [0]); assert flat.all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
