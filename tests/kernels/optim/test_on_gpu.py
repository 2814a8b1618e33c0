"""The compiled optimizers and the norm on a GPU against the CPU path, bit for bit; CUDA graphs."""

import pytest
import torch

from sidestream.kernels import Segments, flat_adamw_, flat_sgd_, l2_norm_, pack_
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.oracle import assert_same

pytestmark = pytest.mark.gpu

NUMEL = 20_000 + 3
COMPUTE = [None, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
STEPS = 3


def shards(grad_dtype, compute_dtype, *, start=0):
    """What a step reads and writes, by name; NaN, infinities and subnormals among it."""
    made = {
        "param": oracle.values(NUMEL, torch.float32, 1),
        "grad": oracle.values(NUMEL, grad_dtype, 2),
        "first": oracle.values(NUMEL, torch.float32, 3),
        "second": oracle.values(NUMEL, torch.float32, 4).abs(),
    }
    if compute_dtype is not None:
        made["compute"] = torch.zeros(NUMEL).to(compute_dtype)
    if compute_dtype is torch.float8_e4m3fn:
        made |= {"compute_scale": torch.tensor(0.37), "amax": torch.zeros(())}
    return {name: _shifted(x, start) if x.dim() else x for name, x in made.items()}


def _shifted(x, start):
    return torch.cat((x[:start], x))[start:]


def on_gpu(tensors):
    return {
        name: _shifted(x.cuda(), x.storage_offset()) if x.dim() else x.cuda()
        for name, x in tensors.items()
    }


def segments(device):
    starts = [0, 4096, 4096, 9000, NUMEL - 16]
    scales = torch.tensor([1.0, 5.0, 0.1, 0.0, 3.0], dtype=torch.float64, device=device)
    decays = torch.tensor([0.1, 7.0, 0.0, 0.3, 0.01], device=device)
    return Segments(starts, scales, decays)


def run_adamw(tensors, device, *, with_segments, found_inf=0):
    rest = dict(tensors)
    main = [rest.pop(name) for name in ("param", "grad", "first", "second")]
    options = {"segments": segments(device)} if with_segments else {"weight_decay": 0.1}
    for step in range(1, STEPS + 1):
        flat_adamw_(
            *main,
            torch.tensor(1e-3, dtype=torch.float64, device=device),
            torch.tensor(step, device=device),
            factor=torch.tensor(0.25, device=device),
            found_inf=torch.tensor(found_inf, dtype=torch.int32, device=device),
            maximize=True,
            **options,
            **rest,
        )


def run_sgd(tensors, device, *, with_segments, nesterov):
    rest = dict(tensors)
    param, grad, first, _ = (rest.pop(name) for name in ("param", "grad", "first", "second"))
    options = {"segments": segments(device)} if with_segments else {"weight_decay": 0.1}
    for step in range(1, STEPS + 1):
        flat_sgd_(
            param,
            grad,
            first,
            torch.tensor(0.1, device=device),
            torch.tensor(step, device=device),
            momentum=0.9,
            nesterov=nesterov,
            **options,
            **rest,
        )


def check(run, grad_dtype, compute_dtype, *, start=0, **options):
    expected = shards(grad_dtype, compute_dtype, start=start)
    found = on_gpu(expected)
    before = {name: x.clone() for name, x in expected.items()}
    run(found, "cuda", **options)
    run(expected, "cpu", **options)
    for name, tensor in expected.items():
        assert_same(found[name], tensor)
    return before, expected


@pytest.mark.parametrize(
    ("with_segments", "start"), [(False, 1), (True, 0)], ids=["unaligned", "segments"]
)
@pytest.mark.parametrize("compute_dtype", COMPUTE, ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps(grad_dtype, compute_dtype, with_segments, start):
    options = {"start": start, "with_segments": with_segments}
    check(run_adamw, grad_dtype, compute_dtype, **options)
    check(run_sgd, grad_dtype, compute_dtype, nesterov=bool(start), **options)


def test_found_inf_stops_everything():
    before, after = check(
        run_adamw, torch.bfloat16, torch.bfloat16, with_segments=False, found_inf=1
    )
    for name, tensor in before.items():
        assert_same(after[name], tensor)


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")], ids=str)
def test_norm(value):
    sizes = [(65_536, 0), (40_001, 1), (3, 0), (0, 0), (9, 2), (300_000, 0)]
    tensors = [
        torch.randn(numel + start).to(oracle.DTYPES[index % 3])[start:]
        for index, (numel, start) in enumerate(sizes)
    ]
    tensors[1][17] = value
    copies = [_shifted(x.cuda(), x.storage_offset()) for x in tensors]
    for squared in (False, True):
        expected, flag = torch.zeros(()), torch.zeros((), dtype=torch.bool)
        l2_norm_(expected, tensors, found_inf=flag, squared=squared)
        found, found_flag = expected.new_zeros(()).cuda(), flag.cuda()
        l2_norm_(found, copies, found_inf=found_flag, squared=squared)
        assert_same(found, expected)
        assert found_flag.item() == flag.item() == (value != 1.0)


def captured(step):
    """A graph of one call of `step`, after calls that compile it and make what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_graph_of_adamw_follows_its_scalars():
    expected = shards(torch.bfloat16, torch.bfloat16)
    found = on_gpu(expected)
    lr, number = torch.tensor(1e-3, device="cuda"), torch.zeros((), dtype=torch.int64).cuda()
    norm, factor = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    parts = segments("cuda")

    def step():
        number.add_(1)
        l2_norm_(norm, [found["grad"]])
        factor.fill_(0.5)
        flat_adamw_(
            *(found[name] for name in ("param", "grad", "first", "second")),
            lr,
            number,
            segments=parts,
            factor=factor,
            compute=found["compute"],
        )

    graph = captured(step)
    for name, tensor in expected.items():
        found[name].copy_(tensor)
    number.zero_()
    for replay, rate in enumerate((1e-3, 2e-3, 5e-4), 1):
        lr.fill_(rate)
        graph.replay()
        flat_adamw_(
            *(expected[name] for name in ("param", "grad", "first", "second")),
            torch.tensor(rate),
            torch.tensor(replay),
            segments=segments("cpu"),
            factor=torch.tensor(0.5),
            compute=expected["compute"],
        )
        for name, tensor in expected.items():
            assert_same(found[name], tensor)


def test_a_graph_of_pack_reads_its_own_tables():
    """One of tensors that are there, as in the step before; one of those the graph makes."""
    flat, made = (torch.zeros(12_000, device="cuda") for _ in range(2))
    sources = [torch.zeros(shape, device="cuda") for shape in ((5000,), (37, 41), (9,))]
    offsets = [0, 5120, 8000]

    def step():
        pack_(flat, sources, offsets, scale=2.0)
        pack_(made, [source + 1.0 for source in sources], offsets)

    graph = captured(step)
    for value in (3.0, 4.0):
        torch.cuda.empty_cache()
        keep = [torch.full((5000,), 9.0, device="cuda") for _ in range(20)]
        pack_(torch.zeros(5000 * 20, device="cuda"), keep, range(0, 5000 * 20, 5000))
        for index, source in enumerate(sources):
            source.fill_(value + index)
        graph.replay()
        for index, (source, offset) in enumerate(zip(sources, offsets, strict=True)):
            place = slice(offset, offset + source.numel())
            assert flat[place].eq(2.0 * (value + index)).all()
            assert made[place].eq(value + index + 1.0).all()
