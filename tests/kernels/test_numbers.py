"""Numbers that may be tensors: their bits, what is refused, and one graph for all of them."""

import copy

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream import kernels as k
from sidestream.tests.kernels import numbers
from sidestream.tests.kernels.test_bad_arguments import CALLS

EACH = pytest.mark.parametrize("call", numbers.CALLS, ids=numbers.IDS)
ON_HOST = {"message_layout", "read_header", "wire_format_named", "wire_format_of"}
ON_DEVICE = [name for name in CALLS if name not in ON_HOST]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
NUMBERS = (int, float)
SCALARS = {"seed": torch.tensor(7), "scale": torch.tensor(0.5)}


class Watching(TorchDispatchMode):
    """Keeps the calls of our ops: (overload, arguments, options)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sidestream":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def numbered(arguments, values):
    """Arguments of a good call, with these values for the numbers among them."""
    found = {key: value for key, value in values.items() if type(arguments.get(key)) in NUMBERS}
    if "first_indices" in arguments and "first_index" in values:
        found["first_indices"] = [values["first_index"], values["first_index"] + 96]
    return arguments | found


def as_bytes(value):
    """FP8 as the bytes it is."""
    is_fp8 = isinstance(value, torch.Tensor) and value.dtype in FP8
    return value.view(torch.uint8) if is_fp8 else value


def tensors_of(value):
    """All tensors in lists, tuples and the values of dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    nested = isinstance(value, (list, tuple))
    return [tensor for part in value for tensor in tensors_of(part)] if nested else []


@EACH
def test_a_tensor_gives_the_bits_of_its_number(call):
    x, number = numbers.source(), call.number()
    made = call.run(x, number)
    assert numbers.same(made, call.run(x, number.item()))
    with Watching() as watching:  # by way of the dispatcher
        assert numbers.same(call.run(x, number.view(1, 1)), made)
    assert [options for *_, options in watching.calls if f"{call.kind}_tensor" in options]
    number.add_(1)
    assert not numbers.same(call.run(x, number), made)
    assert numbers.same(call.run(x, number), call.run(x, number.item()))


@EACH
def test_a_tensor_that_is_no_such_number_is_refused(call):
    x, good = numbers.source(), call.number()
    wrong = torch.int32 if call.kind == "seed" else torch.float64
    for number, message in (
        (good.to(wrong), rf"expected {good.dtype}, got {wrong}; cast or view"),
        (good.to("meta"), r"expected device cpu, got meta; move"),
        (good.expand(2), r"expected one element, got shape \(2,\); pass a 0-d tensor"),
        (good.new_empty(0), r"expected one element, got shape \(0,\)"),
    ):
        with pytest.raises(ValueError, match=f"^{call.kind}: {message}"):
            call.run(x, number)


def test_a_seed_goes_with_noise_whatever_it_is():
    with pytest.raises(ValueError, match=r"^seed: expected None with 'nearest'.*, got a tensor;"):
        k.cast(torch.ones(4), "e4m3", seed=torch.tensor(1))


def test_a_number_may_not_be_what_is_written():
    flat, x, seed = torch.ones(8), torch.ones(4), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^scale: expected memory apart from that of flat,"):
        k.pack_(flat, [x], [0], scale=flat[7:])
    with pytest.raises(ValueError, match=r"^scale: expected .* from that of tensors\[0\],"):
        k.unpack_([x], flat, [0], scale=x[3:])
    with pytest.raises(ValueError, match=r"^out: expected memory apart from that of seed,"):
        k.cast(x, "bf16", rounding="stochastic", seed=seed, out=seed.view(torch.bfloat16))


@pytest.mark.parametrize("name", ON_DEVICE)
def test_opcheck(name):
    """All of it, but for the schema's test where tensors must be FP8: torch cannot compare those.

    Elsewhere they are bytes, which ops take for them.
    """
    function, arguments = CALLS[name]
    with Watching() as watching:
        function(**numbered(copy.deepcopy(arguments), SCALARS))
    for overload, given, options in watching.calls:
        is_fp8 = name.startswith(("quantize_fp8", "dequantize_fp8"))
        if not is_fp8:
            given = [
                one.view(torch.uint8) if getattr(one, "dtype", 0) in FP8 else one for one in given
            ]
        outcomes = torch.library.opcheck(overload, tuple(given), options, raise_exception=False)
        if is_fp8:
            del outcomes["test_schema"]
        assert set(outcomes.values()) == {"SUCCESS"}, overload


def test_every_op_is_checked_and_takes_its_numbers_as_tensors():
    with Watching() as watching:
        for name in ON_DEVICE:
            CALLS[name][0](**copy.deepcopy(CALLS[name][1]))
    ours = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sidestream::") and not name.startswith("sidestream::toy_")
    }
    assert {overload.name().removesuffix(".default") for overload, *_ in watching.calls} == ours
    for overload, *_ in watching.calls:
        taken = {one.name: str(one.type) for one in overload._schema.arguments}
        numbers_of = {name for name in SCALARS if "Tensor" not in taken.get(name, "Tensor")}
        assert {f"{name}_tensor" for name in numbers_of} <= taken.keys(), overload


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_one_graph_for_all_numbers(kind):
    """Of a function that calls every op: with numbers the first has constants, a second symbols."""
    graphs, casts = [], set()

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def everything(calls, values):
        return [CALLS[name][0](**numbered(calls[name], values)) for name in calls]

    def fresh():
        torch.manual_seed(3)
        calls = {name: copy.deepcopy(CALLS[name][1]) for name in ON_DEVICE}
        for tensor in tensors_of(calls):
            if tensor.dtype is torch.float32 and tensor.numel() > 1:
                tensor.uniform_(0.5, 2.0)
        return calls

    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=aot_autograd(fw_compiler=counted))
    for step in range(10):
        values = {"seed": 2**61 // (step + 1), "scale": 1.0 if step == 7 else 0.3 + step}
        if kind == "tensors":
            values = {name: SCALARS[name].new_tensor(value) for name, value in values.items()}
        values["first_index"] = 96 + (kind == "numbers") * 48 * step
        calls, expected = fresh(), fresh()
        found = [compiled(calls, values), calls]
        expected = [everything(expected, values), expected]
        assert numbers.same(tensors_of(found), tensors_of(expected))
        casts.add(bytes(found[1]["cast"]["out"].view(torch.uint8).flatten().tolist()))
    assert len(graphs) == (2 if kind == "numbers" else 1)
    assert len(casts) == 10
