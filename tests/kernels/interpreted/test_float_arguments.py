"""Odd values of every float argument: the interpreted kernels against the definitions, bit for bit.

A compiled kernel has a Python float as FP32, so the interpreter must have it as that too: in FP64
`1 - weight` is another number, and what FP32 has only as a subnormal makes FP64 of all it meets.
"""

import pytest
import torch

from sidestream.kernels.formats.table import MESSAGES
from sidestream.kernels.optim import adamw, sgd
from sidestream.kernels.pack import kernel as pack
from sidestream.kernels.pack import sum as reduce
from sidestream.tests.kernels import oracle
from sidestream.tests.kernels.interpreted import test_flat_optim as optim
from sidestream.tests.kernels.interpreted import test_message as message
from sidestream.tests.kernels.interpreted import test_reduce_message as reduce_message
from sidestream.tests.kernels.optim import cases as optim_cases
from sidestream.tests.kernels.wire import cases, sum_cases

# None is FP32's; two are subnormal there, one is nothing; two are FP32's 1, or 0.5, but for a bit.
FRACTIONS = (0.0, 1e-50, 1e-40, 1e-8, 0.1, 1 / 3, 0.4, 0.5 - 1e-10, 0.5, 0.5 + 1e-10, 0.7, 0.999)
SCALES = (1e-50, 1e-40, 1 / 3, 1.0 + 1e-10, -1.7, 3e38)
NUMEL = 200  # masked; what is done with a float does not depend on it


@pytest.mark.parametrize("value", FRACTIONS)
def test_adamw(value):
    options = dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), value)
    optim.check(optim.adamw_step, adamw, optim_cases.make_shards(NUMEL), **options)


@pytest.mark.parametrize("value", FRACTIONS)
def test_sgd(value):
    shards = optim_cases.make_shards(NUMEL)
    options = {"momentum": value, "weight_decay": value}
    optim.check(optim.sgd_step, sgd, shards.again(), dampening=value, **options)
    optim.check(optim.sgd_step, sgd, shards, dampening=0.0, nesterov=True, **options)


@pytest.mark.parametrize("scale", SCALES)
def test_pack_and_sum(scale):
    case = oracle.make_case([(NUMEL,)] * 3, oracle.DTYPES, torch.bfloat16)
    oracle.check_pack(pack.pack_, case, scale, True)
    oracle.check_unpack(pack.unpack_, case, scale, True)
    for dtype in oracle.DTYPES:
        oracle.check_reduce(reduce.reduce_, 3, NUMEL, (dtype, torch.float32), scale, True)


@pytest.mark.parametrize("scale", SCALES[1:3])
def test_messages(scale):
    tensors = cases.tensors([(NUMEL,), (7,), (130,)])
    for name in MESSAGES:
        layout = cases.layout_for(name, tensors, 128)
        packed = message.check_pack(layout, tensors, scale=scale)
        message.check_unpack(layout, packed, tensors, scale, True)
        messages = sum_cases.random_messages(name, 2, 256, 128)
        reduce_message.run(messages, name, torch.float32, scale, True, row_numel=128)
